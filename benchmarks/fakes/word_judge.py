"""A judge by rule for the task of examples/autorl: the answer is the word of the input that is no color. Pure.

It reads the request of RULER, or that of examples/autorl/compare.py, which has the same form, and nothing else.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from benchmarks.fakes.judge import attempts

_CONTEXT = re.compile(r"<context>\n(.*?)\n</context>", re.DOTALL)
_WORDS = Path(__file__).resolve().parents[2] / "examples" / "autorl" / "words.json"
COLORS = frozenset(json.loads(_WORDS.read_text())["colors"].split())
AMONG_OTHERS = 0.5
"""Score of an answer that has the right word, and others."""


def scores(messages: list[dict[str, Any]], rng: random.Random, noise: float = 0.0) -> dict[str, Any]:
    """Return what a judge answers to a request: {"scores": [...]}.

    `noise`: standard deviation of what is added to each score, which stays within 0 to 1.
    """
    prompt = str(messages[-1]["content"])
    context = _CONTEXT.search(prompt)
    lines = [json.loads(line) for line in context[1].splitlines()] if context else []
    text = "\n".join(str(line["content"]) for line in lines if line.get("role") == "user")
    items = []
    for name, attempt in attempts(prompt).items():
        score = score_of(text, str(attempt[-1].get("content")))
        noisy = min(1.0, max(0.0, rng.gauss(score, noise))) if noise else score
        items.append({"id": name, "explanation": f"by rule, {score}", "score": noisy})
    return {"scores": items}


def score_of(text: str, answer: str) -> float:
    """Return the worth of an answer to an input: 1 if it is the word that is no color."""
    right = {word for word in text.split() if word not in COLORS}
    words = re.findall(r"\w+", answer.casefold())
    if not right & set(words):
        return 0.0
    return 1.0 if len(words) == 1 else AMONG_OTHERS
