"""Shape a trajectory's turns for a page: request, answer, and the model's certainty. Pure.

Pages stay small: of long texts, requests and answers only the beginning is shown, with the number of what is left out.
Sampled tokens are coloured by their logprob, or by their trajectory's advantage. Colour is never the only sign: each
token's tip shows the number, and a legend names the levels.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import msgspec

from proxy.dashboard.views.message_view import MOST_CHARACTERS, Message, indented, messages_of

Tint = Literal["logprob", "advantage", "none"]
TINTS: tuple[Tint, ...] = ("logprob", "advantage", "none")

LEAST_PROBABILITY = (0.9, 0.5, 0.2, 0.05)
"""Least probability of each level, from likely to unlikely; a token below the last one is the most surprising."""
LEAST_ADVANTAGE = (0.05, 0.5, 1.0)
"""Least absolute advantage of each stronger colour."""
MOST_ALONE = 1_500
"""Most tokens of an answer that each get a tip; in longer answers, neighbours of the same colour are merged."""
FIRST_MESSAGES = 5
"""Messages at the beginning of a request that are shown if it has too many; the others are from its end."""
SHOWN_ELSEWHERE = frozenset({"metadata", "user", "messages", "model"})
"""Fields of a request that are shown elsewhere on the page."""

Spell = Callable[[str, Sequence[int]], Sequence[str] | None]
"""Returns what ids spell, by policy; None if no vocabulary has them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of each turn is shown."""

    characters: int = MOST_CHARACTERS
    messages: int = 30
    """Most messages of a request."""
    tokens: int = 8_000
    """Most tokens on a page, over all answers that are shown token by token."""


WHOLE = Bounds(characters=200_000, messages=2_000, tokens=40_000)
"""The bounds of a turn that is shown alone."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token, or neighbours of the same colour."""

    text: str
    look: str
    """Its CSS class; empty: none."""
    tip: str


@dataclass(frozen=True, slots=True)
class LeastLikelyToken:
    """The most surprising token of an answer."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion, ready to show."""

    row: Mapping[str, Any]
    """Its columns."""
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


def answer_of(row: Mapping[str, Any], most_characters: int = MOST_CHARACTERS) -> Message | None:
    """Return the answer: the message, else the text of a text completion."""
    response = row["response"]
    if not row["response_text"] and not (isinstance(response, dict) and response):
        return None
    answer: dict[str, Any] = {"role": "assistant", **(response if isinstance(response, dict) else {})}
    if answer.get("content") is None and row["response_text"]:
        answer["content"] = row["response_text"]
    return messages_of(answer, most_characters)[0]


def level(logprob: float) -> int:
    """Return 0 for a likely token, up to 4 for the most surprising tokens."""
    probability = math.exp(min(0.0, logprob))
    return next((place for place, least in enumerate(LEAST_PROBABILITY) if probability >= least), 4)


def look_of(advantage: float | None) -> str:
    """Return the CSS class of an advantage: `up1` to `up3`, `down1` to `down3`."""
    if advantage is None:
        return ""
    strength = sum(abs(advantage) >= least for least in LEAST_ADVANTAGE)
    return f"{'up' if advantage > 0 else 'down'}{strength}" if strength else ""


def tinted(
    texts: Sequence[str] | None,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    tint: Tint,
    advantage: float | None = None,
) -> list[Token]:
    """Return the tokens in order. `texts`: what each id spells; None if no vocabulary has them: then each token is a
    tick."""
    has_logprobs = logprobs is not None and len(logprobs) == len(token_ids)
    tokens = []
    for place, token_id in enumerate(token_ids):
        logprob = logprobs[place] if logprobs is not None and has_logprobs else None
        look = look_of(advantage) if tint == "advantage" else ""
        if tint == "logprob" and logprob is not None:
            look = f"lp{level(logprob)}" if level(logprob) else ""
        chance = "" if logprob is None else f" · logprob {logprob:.3f} · {math.exp(min(0.0, logprob)):.1%}"
        tokens.append(Token("" if texts is None else texts[place], look, f"token {token_id}{chance}"))
    return tokens if len(tokens) <= MOST_ALONE else _together(tokens)


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
    texts = spell(row["policy"], ids) if wanted and not row["redactions"] else None
    request, left_out = _request_messages(row["new_messages"], bounds)
    return Turn(
        row=row,
        about=_about(row),
        note=_note(row, places),
        request=request,
        left_out=left_out,
        answer=answer_of(row, bounds.characters),
        tools=_tools(row["tools"], bounds.characters),
        tokens=tuple(tinted(texts, ids, logprobs, tint, advantage)) if wanted else (),
        spelled=texts is not None,
        too_many_tokens=tint != "none" and not fits,
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        least_likely=_least_likely(logprobs, texts),
    )


def _request_messages(values: Any, bounds: Bounds) -> tuple[tuple[Message, ...], int]:
    several = values if isinstance(values, list) else [] if values is None else [values]
    left_out = max(0, len(several) - bounds.messages)
    if left_out:
        several = [*several[:FIRST_MESSAGES], *several[FIRST_MESSAGES - bounds.messages :]]
    return tuple(messages_of(several, bounds.characters)), left_out


def _tools(values: Any, most: int) -> tuple[tuple[str, str], ...]:
    tools = values if isinstance(values, list) else []
    inner = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    names = [(one.get("name") or one.get("type")) if isinstance(one, dict) else None for one in inner]
    return tuple((str(name or "a tool")[:most], indented(one, most)) for name, one in zip(names, inner, strict=True))


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


def _together(tokens: Sequence[Token]) -> list[Token]:
    runs = (list(run) for _, run in groupby(tokens, key=lambda one: one.look))
    return [Token("".join(one.text for one in run), run[0].look, f"{len(run)} tokens") for run in runs]
