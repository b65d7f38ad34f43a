"""A judge of the tests' own: a server that speaks OpenAI's wire by a script, and settings that name it."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest

from benchmarks.fakes.json_server import Handler, Server
from judge.ruler import llm as asking
from judge.ruler.errors import CallFailed
from judge.ruler.llm import ask, close
from whetstone.config.rewards import JudgeSettings

MESSAGES = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "These."}]
SCHEMA = {
    "type": "object",
    "properties": {"scores": {"type": "array", "items": {"type": "number"}}},
    "required": ["scores"],
    "additionalProperties": False,
}
SAID = '{"scores": [0.5]}'


class Speaker(Handler):
    """Answers by the server's script, its last line again and again."""

    def respond(self, body):
        self.server.asked.append((self.path, self.headers, body))
        script = self.server.script
        line = script.pop(0) if len(script) > 1 else script[0]
        if callable(line):
            line(self)
            return
        status, content, headers = line if len(line) == 3 else (*line, {})
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)


class Judged:
    """Asks a server of the test's own as judge `strong`."""

    def __init__(self, server):
        self.server = server
        server.asked, server.script, server.gone = [], [], threading.Event()

    def judge(self, **values):
        return JudgeSettings(**{"model": "openai/m", "url": f"{self.server.url}/v1", "timeout_s": 30} | values)

    def says(self, *script):
        self.server.script = list(script)
        return self

    def asked(self, name="strong", **values):
        """One question, in an event loop of its own."""
        return asyncio.run(self._ask(name, self.judge(**values)))

    def refused(self, **values):
        with pytest.raises(CallFailed) as caught:
            self.asked(**values)
        return caught.value

    @property
    def bodies(self):
        return [body for _, _, body in self.server.asked]

    async def _ask(self, name, judge):
        try:
            return await ask(name, judge, MESSAGES, SCHEMA)
        finally:
            await close()


@contextmanager
def judged():
    """Nothing is remembered of judges before it; whoever keeps silent speaks when it ends."""
    asking._refused.clear()
    with Server(Speaker) as server:
        yield Judged(server)
        server.gone.set()


def completion(content=SAID, finish="stop", **values):
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 70, "completion_tokens": 30, "total_tokens": 100}
    head = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m-2026-03-01"}
    return {**head, "choices": [choice], "usage": usage, **values}


def failure(message="no", kind="error", code=None):
    return {"error": {"message": message, "type": kind, "code": code, "param": None}}


GOOD = (200, completion())


def never(handler):
    """Is silent until the test is over."""
    handler.server.gone.wait(20)
