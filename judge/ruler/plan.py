"""Plan which judgements a group needs, of which attempts and by which judges. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from whetstone.config.rewards import RulerSettings
from whetstone.domain.sampling_share import in_share

REWARD, DRIFT = "reward", "drift"
"""The purpose of a judgement: its scores become rewards, or are compared with those that do."""
LONGEST_WAIT_S = 3600.0
"""Judges that give nothing are called again after about 2, 4, 8, … seconds, at most after this many."""
SPREAD = 0.25
"""Waits vary randomly by this share, so that judges that failed together are not called again together."""


@dataclass(frozen=True, slots=True)
class PlannedJudgement:
    """One judgement that is needed."""

    place: int
    """Index among the judgements of the same attempts, from 0."""
    section: int
    """Index of the section, from 0."""
    purpose: str
    judge: str
    """The judge that is called first."""


def sections(attempts: int, most: int) -> list[tuple[int, ...]]:
    """Return the attempts that are judged together: all of them or, of more than `most`, sections that overlap by half.

    Each section has `most` attempts, and half of them are in the next one too, the last one's in the first: a chain
    through which every attempt is compared with every other. The caller's order must not reveal which attempts are
    good.
    """
    if attempts <= most:
        return [tuple(range(attempts))]
    step = max(most // 2, 1)
    return [tuple((start + one) % attempts for one in range(most)) for start in range(0, attempts, step)]


def slots(parts: int, ruler: RulerSettings, judges: Sequence[str], group_id: str) -> list[PlannedJudgement]:
    """Return the judgements of a group with `parts` sections, by these judges in turn; the strong judge's last."""
    needed = [
        PlannedJudgement(place, section, REWARD, judges[place % len(judges)])
        for place in range(ruler.judgements)
        for section in range(parts)
    ]
    if ruler.strong is not None and in_share(f"strong {group_id}", ruler.strong_share):
        needed += [PlannedJudgement(ruler.judgements, section, DRIFT, ruler.strong) for section in range(parts)]
    return needed


def next_judge(judge: str, first: str, fallback: Sequence[str]) -> str | None:
    """Return the judge to call when `judge` does not answer in the place of `first`; None: there is none left."""
    order = [first, *(name for name in fallback if name != first)]
    later = order[order.index(judge) + 1 :] if judge in order else [first]
    return later[0] if later else None


def wait_s(failures: int, rng: random.Random) -> float:
    """Return the wait after this many failed calls in a row: it doubles each time, and varies by a quarter up and down.

    Never over `LONGEST_WAIT_S`; the longest waits vary too, below it.
    """
    wait = min(LONGEST_WAIT_S / (1 + SPREAD), 2.0 ** min(failures, 12))
    return min(LONGEST_WAIT_S, wait * rng.uniform(1 - SPREAD, 1 + SPREAD))
