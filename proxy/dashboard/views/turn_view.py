"""Shape a trajectory's turns for a page: request, answer, and the model's certainty. Pure.

Pages stay small: of long texts, requests and answers only the beginning is shown, with the number of what is left out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from proxy.dashboard.views.message_view import MOST_CHARACTERS, Message, indented, messages_of
from proxy.dashboard.views.token_colours import Tint, Token, tinted

MOST_MESSAGES = 30
"""Most messages of a request; the first and the last messages are shown."""
FIRST_MESSAGES = 5
MOST_TOKENS = 8_000
"""Most tokens on a page, over all answers that are shown token by token."""
WHOLE_CHARACTERS = 200_000
WHOLE_MESSAGES = 2_000
WHOLE_TOKENS = 40_000
"""The bounds of a turn that is shown alone."""
SHOWN_ELSEWHERE = frozenset({"metadata", "user", "messages", "model"})
"""Fields of a request that are shown elsewhere on the page."""

Spell = Callable[[str, Sequence[int]], Sequence[str] | None]
"""Returns what ids spell, by policy; None if no vocabulary has them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of each turn is shown."""

    characters: int = MOST_CHARACTERS
    messages: int = MOST_MESSAGES
    tokens: int = MOST_TOKENS


WHOLE = Bounds(WHOLE_CHARACTERS, WHOLE_MESSAGES, WHOLE_TOKENS)


@dataclass(frozen=True, slots=True)
class LeastLikelyToken:
    """The most surprising token of an answer."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, ready to show."""

    id: str
    number: int
    policy: str
    version: int
    status: str
    error: str | None
    endpoint: str
    finish_reason: str | None
    threaded_by: str
    why_not_trained: str | None
    prompt_tokens: int | None
    sampled_tokens: int | None
    ttft_ms: float | None
    total_ms: float | None
    created_at: datetime
    about: tuple[tuple[str, str], ...]
    """More details: name and value."""
    note: str | None
    """Set where its prompt does not continue the previous turn."""
    request: tuple[Message, ...]
    left_out: int
    """Messages of the request that are not shown; they come after the first `FIRST_MESSAGES`."""
    answer: Message | None
    tools: tuple[tuple[str, str], ...]
    """Name and definition, if the request's tools differ from the previous turn's."""
    redactions: int
    tokens: tuple[Token, ...]
    """The answer token by token; empty if that is not wanted, or there are too many tokens."""
    spelled: bool
    """Whether the tokens have their texts."""
    too_many_tokens: bool
    mean_logprob: float | None
    least_likely: LeastLikelyToken | None


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of turns that are not shown."""

    start: int
    end: int


def turns_of(
    rows: Iterable[Mapping[str, Any]],
    *,
    spell: Spell,
    tint: Tint,
    advantages: Mapping[str, float | None],
    bounds: Bounds,
    places: Mapping[str, tuple[str, int]],
) -> list[Turn]:
    """Return the rows as turns, in their order. `advantages`: by policy. `places`: trajectory and turn of the
    completions that they continue."""
    made, left = [], bounds.tokens
    for row in rows:
        turn = _turn(row, spell, tint, advantages.get(row["policy"]), bounds, left, places)
        left -= len(row["token_ids"] or ()) if turn.tokens else 0
        made.append(turn)
    return made


def _turn(
    row: Mapping[str, Any],
    spell: Spell,
    tint: Tint,
    advantage: float | None,
    bounds: Bounds,
    tokens_left: int,
    places: Mapping[str, tuple[str, int]],
) -> Turn:
    ids: Sequence[int] = row["token_ids"] or ()
    logprobs: Sequence[float] | None = row["inference_logprobs"]
    fits = len(ids) <= tokens_left
    wanted = tint != "none" and bool(ids) and fits
    # Token ids that the settings keep (`privacy.keep_redacted_ids`) would spell the redacted text.
    is_redacted = bool(row["redactions"])
    texts = spell(row["policy"], ids) if wanted and not is_redacted else None
    request, left_out = _request_messages(row["new_messages"], bounds)
    return Turn(
        id=row["id"],
        number=row["turn"],
        policy=row["policy"],
        version=row["policy_version"],
        status=row["status"],
        error=row["error"],
        endpoint=row["endpoint"],
        finish_reason=row["finish_reason"],
        threaded_by=row["threaded_by"],
        why_not_trained=row["why_not_trained"],
        prompt_tokens=row["prompt_tokens"],
        sampled_tokens=row["completion_tokens"],
        ttft_ms=row["ttft_ms"],
        total_ms=row["total_ms"],
        created_at=row["created_at"],
        about=_about(row),
        note=_note(row, places),
        request=request,
        left_out=left_out,
        answer=answer_of(row, bounds.characters),
        tools=_tools(row["tools"], bounds.characters),
        redactions=row["redactions"] or 0,
        tokens=tuple(tinted(texts, ids, logprobs, tint, advantage)) if wanted else (),
        spelled=texts is not None,
        too_many_tokens=tint != "none" and not fits,
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        least_likely=_least_likely(logprobs, texts),
    )


def answer_of(row: Mapping[str, Any], most_characters: int = MOST_CHARACTERS) -> Message | None:
    """Return the answer: the message, else the text of a text completion."""
    response = row["response"]
    if isinstance(response, dict) and response:
        answer = {"role": "assistant", **response}
        if answer.get("content") is None and row["response_text"]:
            answer["content"] = row["response_text"]
        return messages_of(answer, most_characters)[0]
    if row["response_text"]:
        return messages_of({"role": "assistant", "content": row["response_text"]}, most_characters)[0]
    return None


def _request_messages(values: Any, bounds: Bounds) -> tuple[tuple[Message, ...], int]:
    several = values if isinstance(values, list) else [] if values is None else [values]
    left_out = max(0, len(several) - bounds.messages)
    if left_out:
        several = [*several[:FIRST_MESSAGES], *several[FIRST_MESSAGES - bounds.messages :]]
    return tuple(messages_of(several, bounds.characters)), left_out


def _tools(values: Any, most: int) -> tuple[tuple[str, str], ...]:
    tools = []
    for tool in values if isinstance(values, list) else []:
        inner = tool.get("function", tool) if isinstance(tool, dict) else tool
        name = inner.get("name") or inner.get("type") if isinstance(inner, dict) else None
        tools.append((str(name or "a tool")[:most], indented(inner, most)))
    return tuple(tools)


def _note(row: Mapping[str, Any], places: Mapping[str, tuple[str, int]]) -> str | None:
    if row["follows"] is None:
        return "The app sent a new prompt that contains none of the earlier turns." if row["turn"] else None
    trajectory, turn = places.get(row["follows"], (None, None))
    if turn is None or turn == row["turn"] - 1:
        return None
    return f"Continues turn {turn + 1}." if trajectory is not None else None


def _least_likely(logprobs: Sequence[float] | None, texts: Sequence[str] | None) -> LeastLikelyToken | None:
    if not logprobs:
        return None
    place = min(range(len(logprobs)), key=logprobs.__getitem__)
    return LeastLikelyToken("" if texts is None or place >= len(texts) else texts[place].strip(), logprobs[place])


def _about(row: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    sampling = {name: value for name, value in (row["sampling"] or {}).items() if name not in SHOWN_ELSEWHERE}
    named = (
        ("completion", row["id"]),
        ("id in the response", row["upstream_id"]),
        ("parameters", msgspec.json.encode(sampling).decode()[:2_000] if sampling else None),
        ("key", row["key_id"]),
        ("end user", row["end_user"]),
        ("retry of", row["retry_of"]),
        ("choice", str(row["choice"]) if row["choice"] else None),
        ("redactions", str(row["redactions"]) if row["redactions"] else None),
    )
    return tuple((name, value) for name, value in named if value)
