"""Which judgements a group needs, of which attempts and by whom. Pure; knows no prompt and no table."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from whetstone.worth import RulerSettings

REWARD, DRIFT = "reward", "drift"
"""What a judgement is for: its scores make rewards, or are compared with those that do."""
LONGEST_WAIT_S = 3600.0
"""Judges that give nothing are asked again after about 2, 4, 8, … seconds, never later than after these."""
SPREAD = 0.25
"""Waits are so much shorter or longer, by chance: judges that went down together are not asked again together."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One judgement that is needed."""

    place: int
    """Which of the judgements of the same attempts, from 0."""
    section: int
    """Which of the sections, from 0."""
    purpose: str
    judge: str
    """Who is asked first."""


def sections(attempts: int, most: int) -> list[tuple[int, ...]]:
    """The attempts that are read together: all of them, or of more than `most`, parts that overlap by half.

    Each part holds `most` attempts, and half of them are in the next one too, the last one's in the first: a chain
    through which every attempt is compared with every other. The caller's order must not tell who is good.
    """
    if attempts <= most:
        return [tuple(range(attempts))]
    step = max(most // 2, 1)
    return [tuple((start + one) % attempts for one in range(most)) for start in range(0, attempts, step)]


def slots(parts: int, ruler: RulerSettings, judges: Sequence[str], group_id: str) -> list[Slot]:
    """The judgements of a group that is read in so many parts, by these judges in turn; those of the sample last."""
    needed = [
        Slot(place, section, REWARD, judges[place % len(judges)])
        for place in range(ruler.judgements)
        for section in range(parts)
    ]
    if ruler.strong is not None and sampled(f"strong {group_id}", ruler.strong_share):
        needed += [Slot(ruler.judgements, section, DRIFT, ruler.strong) for section in range(parts)]
    return needed


def sampled(key: str, share: float) -> bool:
    """Whether this one is of the sample: the same answer whenever it is asked."""
    drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64
    return drawn < share


def after(judge: str, first: str, fallback: Sequence[str]) -> str | None:
    """Who is asked when `judge` will not answer in the place of `first`; None: nobody is left."""
    order = [first, *(name for name in fallback if name != first)]
    later = order[order.index(judge) + 1 :] if judge in order else [first]
    return later[0] if later else None


def wait_s(failures: int, rng: random.Random) -> float:
    """How long to wait after so many calls in a row that gave nothing: twice as long each time, spread by a half.

    Never over `LONGEST_WAIT_S`; the longest waits are spread too, below it.
    """
    wait = min(LONGEST_WAIT_S / (1 + SPREAD), 2.0 ** min(failures, 12))
    return min(LONGEST_WAIT_S, wait * rng.uniform(1 - SPREAD, 1 + SPREAD))
