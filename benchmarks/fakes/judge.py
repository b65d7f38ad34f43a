"""OpenAI-compatible judges that compute the worth of every attempt, and answer wrongly on request.

`ScriptedJudge` reads the prompt only by its tags. An attempt's worth is written in it (`worth 0.3`) or, for any other
text, follows from its last message. `RuleJudge` has a function judge the request, as examples/mail/rule_judge.py does;
`python -m benchmarks.fakes.judge --noise 0.1` serves that judge until it is stopped.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer

ATTEMPT = re.compile(r'<attempt id="(\w+)">\n(.*?)\n</attempt>', re.DOTALL)
WORTH = re.compile(r"worth ([01]\.\d+)")

Fault = Callable[[int, random.Random], str | None]
"""Number of the call, from 0 -> its fault, one of FAULTS; None: no fault."""


def worth(message: dict[str, Any]) -> float:
    """Return the worth of an attempt that ends with this message: 0 to 1, in thousandths."""
    text = str(message.get("content"))
    if matches := WORTH.findall(text):
        return float(matches[-1])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).digest()) % 1001 / 1000


def attempts(prompt: str) -> dict[str, list[dict[str, Any]]]:
    """Return id -> messages of a judge's prompt."""
    return {name: [json.loads(line) for line in lines.splitlines()] for name, lines in ATTEMPT.findall(prompt)}


Item = dict[str, Any]
Wrong = Callable[[list[Item], random.Random], list[Item]]
"""Right items of an answer, a random generator -> wrong ones."""
OUT_OF_RANGE = (7, -3, 1.0001, -0.0001, 1e308)
NO_NUMBER = (None, "0.5", True, [0.5], float("nan"))
WRONG_ITEMS: dict[str, Wrong] = {
    "short": lambda items, _rng: items[:-1],
    "duplicated": lambda items, _rng: [*items, items[0] | {"score": 1.0}],
    "renamed": lambda items, _rng: [items[0] | {"id": "zzzzzz"}, *items[1:]],
    "taken twice": lambda items, _rng: [items[-1] | {"score": 0.5}, *items[1:]],
    "out of range": lambda items, rng: [items[0] | {"score": rng.choice(OUT_OF_RANGE)}, *items[1:]],
    "no number": lambda items, rng: [items[0] | {"score": rng.choice(NO_NUMBER)}, *items[1:]],
}
"""Answers of the right form that must be refused."""
NOT_JSON = "not JSON"
HTTP = {"overloaded": 503, "broken": 500, "limited": 429}
WRONG = (*WRONG_ITEMS, NOT_JSON)
"""Answers that must be refused."""
FAULTS = (*WRONG, *HTTP, "slow", "cut")


class ScriptedJudge(Server):
    """Answers at `url`. Right answers come in any order, which is right too."""

    def __init__(
        self, fault: Fault = lambda _number, _rng: None, slow_s: float = 5.0, seed: int = 0, port: int = 0
    ) -> None:
        self.fault, self.slow_s = fault, slow_s
        self.rng = random.Random(seed)
        self.prompts: list[str] = []
        """The user's message of each call."""
        self.noise: Callable[[int, str], float] = lambda _number, _text: 0.0
        """Noise that is added to the score of an attempt that ends with this text, in the call of this number."""
        self._lock = threading.Lock()
        super().__init__(_Handler, port, base="/v1")

    @property
    def calls(self) -> int:
        """Number of calls."""
        return len(self.prompts)

    def record_call(self, prompt: str) -> tuple[int, str | None, random.Random]:
        """Record a call; return its number, its fault, and a random generator."""
        with self._lock:
            number = len(self.prompts)
            self.prompts.append(prompt)
            return number, self.fault(number, self.rng), random.Random(self.rng.random())

    def items(self, number: int, messages: list[dict[str, Any]], _rng: random.Random) -> list[Item]:
        """Return the right items of the answer to a call."""
        items = []
        for name, lines in attempts(messages[-1]["content"]).items():
            noise = self.noise(number, str(lines[-1].get("content")))
            score = min(1.0, max(0.0, worth(lines[-1]) + noise))
            items.append({"id": name, "explanation": f"worth {score}", "score": score})
        return items


Rule = Callable[[list[dict[str, Any]], random.Random, float], dict[str, Any]]
"""Messages of a request, a random generator, the standard deviation of the noise -> {"scores": [...]}."""


class RuleJudge(ScriptedJudge):
    """Answers what a function makes of the request. The seed draws the noise, by the number of the call.

    `shuffled`: each attempt gets the score of another one of its group, or its own, by chance, and in every judgement
    of the group the same: a control.
    """

    def __init__(self, rule: Rule, noise_sd: float = 0.0, *, shuffled: bool = False, **options: Any) -> None:
        self.rule, self.noise_sd, self.shuffled = rule, noise_sd, shuffled
        super().__init__(**options)

    def items(self, _number: int, messages: list[dict[str, Any]], rng: random.Random) -> list[Item]:
        items: list[Item] = self.rule(messages, rng, self.noise_sd)["scores"]
        return _shuffled(items, dict(ATTEMPT.findall(messages[-1]["content"]))) if self.shuffled else items


def _shuffled(items: list[Item], texts: dict[str, str]) -> list[Item]:
    """Return the items with their scores exchanged. `texts`: id -> the attempt.

    The ids and their order differ from judgement to judgement, so the attempts' texts decide.
    """
    items = sorted(items, key=lambda item: texts[item["id"]])
    donors = random.Random("\n".join(texts[item["id"]] for item in items)).sample(items, len(items))
    return [item | {"score": donor["score"]} for item, donor in zip(items, donors, strict=True)]


class _Handler(Handler):
    server: ScriptedJudge

    def respond(self, body: dict[str, Any]) -> None:
        prompt = body["messages"][-1]["content"]
        number, fault, rng = self.server.record_call(prompt)
        items = self.server.items(number, body["messages"], rng)
        if fault == "slow":
            time.sleep(self.server.slow_s)
        if fault in HTTP:
            self.whole(HTTP[fault], {"error": {"message": fault, "type": "server_error", "code": None}})
            return
        text = _text(fault, items, rng)
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(text) // 4, "total_tokens": 1}
        answer = chat_answer(text, f"{body['model']}-2026-01-01", usage=usage)
        self.whole(200, answer, sent=0.5 if fault == "cut" else 1.0)


def _text(fault: str | None, items: list[Item], rng: random.Random) -> str:
    right = json.dumps({"scores": items})
    if fault == NOT_JSON:
        return rng.choice(
            ["I would say they are all good.", "", right[:-7], f"Here you are: {right}", "[0.5, 0.5]", "null"]
        )
    if fault in WRONG_ITEMS:
        return json.dumps({"scores": WRONG_ITEMS[fault](items, rng)})
    return json.dumps({"scores": rng.sample(items, len(items))})


def rule_in(file: Path) -> Rule:
    """Return the function `scores` of a file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up the module that they are defined in
    spec.loader.exec_module(module)
    rule: Rule = module.scores
    return rule


def main() -> None:
    mail = Path(__file__).resolve().parents[2] / "examples" / "mail" / "rule_judge.py"
    parser = argparse.ArgumentParser(description="Serve a judge by rule, for RULER, where no strong model is.")
    parser.add_argument("--rule", type=Path, default=mail, help="the file whose function `scores` judges")
    parser.add_argument("--port", type=int, default=8100, help="where it listens, on loopback; 0: any free port")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of what is added to each score")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    args = parser.parse_args()
    judge = RuleJudge(rule_in(args.rule), args.noise, seed=args.seed, port=args.port)
    # Whoever reads the address may send SIGINT before `print` has returned.
    with contextlib.suppress(KeyboardInterrupt), judge:
        print(judge.url, flush=True)  # noqa: T201 - the address that whetstone.toml needs
        signal.pause()


if __name__ == "__main__":
    main()
