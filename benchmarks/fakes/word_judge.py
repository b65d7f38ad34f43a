"""A judge by rule for the task of examples/autorl: the answer is the one word of the input that is no color.

`score_prompt` reads RULER's prompts and those of compare.py, which have the same form. `python -m
benchmarks.fakes.word_judge` serves it as an OpenAI-compatible server.
"""

import argparse
import json
import re
import threading
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer
from benchmarks.fakes.judge import attempts

_CONTEXT = re.compile(r"<context>\n(.*?)\n</context>", re.DOTALL)
_WORDS = Path(__file__).resolve().parents[2] / "examples" / "autorl" / "words.json"
COLORS = frozenset(json.loads(_WORDS.read_text())["colors"].split())


def score(text: str, answer: str) -> float:
    """Return the worth of an answer to this input: 1 for the right word alone, 0.5 for it among others, else 0."""
    right = {word for word in text.split() if word not in COLORS}
    words = re.findall(r"\w+", answer.casefold())
    if not right & set(words):
        return 0.0
    return 1.0 if len(words) == 1 else 0.5


def score_prompt(prompt: str) -> str:
    """Return the JSON that a judge answers to a prompt: a score for each attempt in it."""
    context = _CONTEXT.search(prompt)
    messages = [json.loads(line) for line in context[1].splitlines()] if context else []
    inputs = [str(message["content"]) for message in messages if message.get("role") == "user"]
    scores = [
        {"id": name, "explanation": "by rule", "score": score("\n".join(inputs), str(lines[-1].get("content")))}
        for name, lines in attempts(prompt).items()
    ]
    return json.dumps({"scores": scores})


class WordJudge(Server):
    """Answers at `url`, until its `with` ends."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(_Handler, port, base="/v1")


class _Handler(Handler):
    def respond(self, body: dict[str, Any]) -> None:
        self.whole(200, chat_answer(score_prompt(body["messages"][-1]["content"]), body["model"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the judge by rule for examples/autorl on loopback.")
    parser.add_argument("--port", type=int, default=8011, help="where it listens")
    with WordJudge(parser.parse_args().port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
