"""Colour sampled tokens: by their logprob, or by their trajectory's advantage. Pure.

Colour is never the only sign: each token's tip shows the number, and a legend names the levels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Tint = Literal["logprob", "advantage", "none"]
TINTS: tuple[Tint, ...] = ("logprob", "advantage", "none")

LEAST_PROBABILITY = (0.9, 0.5, 0.2, 0.05)
"""Least probability of each level, from likely to unlikely; a token below the last one is the most surprising."""
LEAST_ADVANTAGE = (0.05, 0.5, 1.0)
"""Least absolute advantage of each stronger colour."""
MOST_ALONE = 1_500
"""Most tokens of an answer that each get a tip; in longer answers, neighbours of the same colour are merged."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token, or neighbours of the same colour."""

    text: str
    look: str
    """Its CSS class; empty: none."""
    tip: str


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


def _together(tokens: Sequence[Token]) -> list[Token]:
    runs = (list(run) for _, run in groupby(tokens, key=lambda one: one.look))
    return [Token("".join(one.text for one in run), run[0].look, f"{len(run)} tokens") for run in runs]
