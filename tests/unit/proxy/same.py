"""When two answers are the same: the proxy's, and that of vLLM alone. Knows bytes; asks nobody.

Masked is what may differ: ids behind their prefix, times, the name of the model where it is the one asked for, and how
many fields a validation error counts. All else is compared byte for byte, but for logprobs: batches and caches move
their last digits.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import httpx

TOLERANCE = 1e-4
"""Nats between two logprobs of one token; a batch or a cached prefix moves a float32 logprob by less [measured]."""

_MASKED = re.compile(
    r'"id":"(?P<kind>chatcmpl-tool-|chatcmpl-|cmpl-)[^"]*"'
    r'|"created":(?P<time>\d+)'
    r'|"model":"(?P<model>[^"]*)"'
    r'|"(?:[^"\\]|\\.)*"'
    r"|(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)
_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')


class Event(NamedTuple):
    """One event of a stream, or a whole answer, as it is compared."""

    text: str
    """Masked."""
    logprobs: list[float]
    """Every number with a fraction, in order, in nats: an answer has no others."""


class Answer(NamedTuple):
    """An answer as it is compared."""

    status: int
    content_type: str
    events: list[Event]

    def by_choice(self) -> "Answer":
        """The events of one choice behind those of another; what speaks of none stays last."""
        return self._replace(events=sorted(self.events, key=_choice))


def masked(response: httpx.Response, model: str) -> Answer:
    """An answer to a request that named this model."""
    pieces = response.text.split("\n\n") if _is_stream(response) else [response.text]
    if not response.is_success:
        pieces = [re.sub("<dict of [0-9]+ items>", "<dict>", piece.replace(model, "…")) for piece in pieces]
    events = [_event(piece, model) for piece in pieces]
    return Answer(response.status_code, response.headers["content-type"], events)


def same(through: Answer, alone: Answer) -> bool:
    """Whether the app could not tell them apart."""
    return (
        through[:2] == alone[:2]
        and len(through.events) == len(alone.events)
        and all(
            one.text == other.text and _close(one.logprobs, other.logprobs)
            for one, other in zip(through.events, alone.events, strict=True)
        )
    )


def _is_stream(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def _event(text: str, model: str) -> Event:
    logprobs: list[float] = []

    def mask(match: re.Match[str]) -> str:
        if match["kind"]:
            return f'"id":"{match["kind"]}…"'
        if match["time"]:
            return '"created":…'
        if match["model"] == model:
            return '"model":"…"'
        if match["number"] and not match["number"].lstrip("-").isdigit():
            logprobs.append(float(match["number"]))
            return "…"
        return match[0]

    return Event(_MASKED.sub(mask, text), logprobs)


def _close(some: Sequence[float], others: Sequence[float]) -> bool:
    return len(some) == len(others) and all(
        math.isclose(one, other, abs_tol=TOLERANCE, rel_tol=0) for one, other in zip(some, others, strict=True)
    )


def _choice(event: Event) -> float:
    found = _CHOICE.search(event.text)
    return int(found[1]) if found else math.inf
