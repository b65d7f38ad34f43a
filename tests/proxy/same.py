"""When two answers are the same: the proxy's, and that of vLLM alone. Knows bytes; asks nobody.

Masked is what may differ: ids behind their prefix, times, the name of the model as it was asked for, and how many
fields a validation error counts. All else is compared byte for byte, but for logprobs: batches and caches move their
last digits.
"""

import math
import re
from typing import NamedTuple

import httpx

TOLERANCE = 1e-4
"""Nats between two logprobs of one token; a batch or a cached prefix moves a float32 logprob by less [measured]."""

_TOKENS = re.compile(
    r'"id":"(?P<kind>chatcmpl-tool-|chatcmpl-|cmpl-)[^"]*"'
    r'|"created":(?P<time>\d+)'
    r'|"model":"(?P<model>[^"]*)"'
    r'|"(?:[^"\\]|\\.)*"'
    r"|(?P<logprob>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)


class Answer(NamedTuple):
    """An answer as it is compared."""

    status: int
    content_type: str
    text: str
    """The body, masked: events of a stream in their order."""
    logprobs: list[float]
    """Every number with a fraction, in order, in nats: an answer has no others."""


def masked(response: httpx.Response, model: str) -> Answer:
    """An answer to a request that named this model."""
    logprobs: list[float] = []

    def mask(match: re.Match[str]) -> str:
        if match["kind"]:
            return f'"id":"{match["kind"]}…"'
        if match["time"]:
            return '"created":…'
        if match["model"] == model:
            return '"model":"…"'
        if match["logprob"] and not match["logprob"].lstrip("-").isdigit():
            logprobs.append(float(match["logprob"]))
            return "…"
        return match[0]

    text = _TOKENS.sub(mask, response.text)
    if not response.is_success:
        text = re.sub("<dict of [0-9]+ items>", "<dict>", text.replace(model, "…"))
    return Answer(response.status_code, response.headers["content-type"], text, logprobs)


def same(through: Answer, alone: Answer) -> bool:
    """Whether the app could not tell them apart."""
    return through[:3] == alone[:3] and all(
        math.isclose(one, other, abs_tol=TOLERANCE, rel_tol=0)
        for one, other in zip(through.logprobs, alone.logprobs, strict=True)
    )
