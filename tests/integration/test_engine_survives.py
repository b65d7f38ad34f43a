"""No request takes a real vLLM down for the others: what is known to kill it never gets there, or gets there harmless.

All of it is sent while requests of different lengths are in flight: alone, each of them would survive.
"""

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.proxy.conftest import RunningProxy

pytestmark = pytest.mark.stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
DEADLY: dict[str, tuple[str, dict[str, Any], int]] = {
    "prompt logprobs": (CHAT, {"prompt_logprobs": 0}, 400),
    "prompt logprobs of a completion": (COMPLETIONS, {"prompt_logprobs": 1}, 400),
    "prompt logprobs in a stream": (CHAT, {"prompt_logprobs": 0, "stream": True}, 400),
    "an echo with logprobs": (CHAT, {"echo": True, "logprobs": True}, 400),
    "an echo with top_logprobs": (CHAT, {"echo": True, "logprobs": True, "top_logprobs": 2}, 400),
    "an echo of a completion with logprobs": (COMPLETIONS, {"echo": True, "logprobs": 0}, 400),
    # vLLM makes prompt logprobs of a chat's echo that asks for none, even with null.
    "an echo": (CHAT, {"echo": True}, 400),
    "an echo without top_logprobs": (CHAT, {"echo": True, "top_logprobs": None}, 400),
    "an echo in a stream": (CHAT, {"echo": True, "stream": True}, 400),
    "an echo of what is continued": (CHAT, {"echo": True, **CONTINUED}, 400),
    "an echo in other words": (CHAT, {"echo": "yes"}, 400),
    "an echo of a completion": (COMPLETIONS, {"echo": True}, 200),
}
"""Endpoint, fields, and the status that they are answered with."""
IN_FLIGHT = 9


def body_of(path: str, words: int, **values: Any) -> dict[str, Any]:
    """A request of about so many tokens in and out."""
    text = "hello " * words
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {"model": "starter", "max_tokens": 4 + words, **prompt, **values}


class Others:
    """Requests of different lengths, IN_FLIGHT at a time, for as long as the block lasts; `answered` has them all."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answered: list[httpx.Response] = []
        self._client = client
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Others":
        self._tasks = [asyncio.create_task(self._ask(1 + 5 * place)) for place in range(IN_FLIGHT)]
        await self.next_round()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)

    async def next_round(self) -> None:
        """Wait until as many more have been answered as are in flight."""
        enough = len(self.answered) + IN_FLIGHT
        while len(self.answered) < enough:
            await asyncio.wait(self._tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            for task in self._tasks:
                assert not task.done() or task.exception() is None, task.exception()

    async def _ask(self, words: int) -> None:
        while self._going:
            self.answered.append(await self._client.post(CHAT, json=body_of(CHAT, words)))


@pytest.mark.parametrize("name", DEADLY)
def test_what_would_kill_the_engine_harms_no_other_request(name: str, real: RunningProxy, vllm_url: str) -> None:
    path, values, status = DEADLY[name]

    async def among_others() -> tuple[list[httpx.Response], list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=real.url, timeout=120, trust_env=False, verify=False) as client:
            async with Others(client) as others:
                bodies = [body_of(path, words, **values) for words in (1, 8, 20, 40)]
                deadly = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
                await others.next_round()
            return deadly, others.answered

    deadly, others = asyncio.run(among_others())
    assert {response.status_code for response in deadly} == {status}
    if status == 400:
        assert {response.json()["error"]["param"] for response in deadly} <= set(values)
    assert {response.status_code for response in others} == {200}
    assert httpx.get(f"{vllm_url}/health", trust_env=False, verify=False).status_code == 200
