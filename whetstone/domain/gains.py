"""Compute by how much the mean reward of one version exceeds that of another; attempts at the same prompt are paired.
Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whetstone.domain.stats import FEWEST_REWARDS, Interval, Sample, paired, welch

MOST_PAIRED = 8_000
"""Most held-out rewards of two versions that are paired; reading more would take too long."""
SAME_SHARE = 0.5
"""Share of attempts that have a counterpart at the same prompt, from which on two versions had the same prompts."""
ByPrompt = Mapping[str, Sequence[float]]
"""Hash of the prompt -> rewards of its attempts, in their order."""


@dataclass(frozen=True)
class Gain:
    """The difference of two mean rewards."""

    difference: Interval
    pairs: int | None
    """Number of attempts at the same prompt that were paired; None if all rewards were compared, unpaired."""


def may_be_paired(before: int, after: int) -> bool:
    """Return whether so many rewards of two versions are few enough to be read by prompt."""
    return before + after <= MOST_PAIRED


def gain(before: Sample, after: Sample, rewards_before: ByPrompt, rewards_after: ByPrompt) -> Gain:
    """Return the gain of the version `after`. `rewards_before`, `rewards_after`: the same rewards by prompt; empty if
    they are not known.

    Attempts at the same prompt are paired, in their order, if at least FEWEST_REWARDS have a partner, and half of the
    attempts of the version that has fewer. Otherwise all rewards are compared by Welch's interval.
    """
    differences = [
        [later - earlier for earlier, later in zip(rewards_before[prompt], rewards_after[prompt], strict=False)]
        for prompt in rewards_before.keys() & rewards_after.keys()
    ]
    pairs = sum(map(len, differences))
    if pairs >= FEWEST_REWARDS and pairs >= SAME_SHARE * min(before.n, after.n):
        return Gain(paired(differences), pairs)
    return Gain(welch(before, after), None)


def had_same_prompts(before: Sequence[str], after: Sequence[str]) -> bool | None:
    """Return whether most attempts of both versions were at prompts that the other version had too; None if the prompts
    of one are unknown. `before`, `after`: the hash of each attempt's prompt."""
    if not before or not after:
        return None
    common = set(before) & set(after)
    return all(sum(prompt in common for prompt in each) >= SAME_SHARE * len(each) for each in (before, after))
