"""Compute what is missing until a project's first step: calls, groups, rewards, training, the step. Pure.

The counts come from the funnel (`views.funnel`), the last remedy from what `whetstone status` says
(`whetstone.doctor.training`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from proxy.dashboard.views.funnel import DropOut, FunnelStage, Stage
from whetstone.doctor.training import REMEDIES
from whetstone.domain.why_not_trained import WhyNotTrained as Why


@dataclass(frozen=True, slots=True)
class Milestone:
    """One of the things that a first step needs."""

    name: str
    is_there: bool
    status: str
    """What is there, in words and numbers."""
    remedy: str | None
    """What to do if it is not there, or not for all calls."""
    reason: str | None = None
    """The `why_not_trained` of the calls that the remedy is for."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a policy that has taken no step."""

    policy: str
    state: str
    stages: Sequence[FunnelStage]
    """Of all its trajectories."""
    groups: int
    """Its groups of two or more attempts."""
    has_baseline: bool
    """Whether attempts without a group are compared with a running mean."""
    ready: float | None
    """Scored groups that wait for a step, single attempts in part; None if it does not train."""
    groups_per_step: int
    why_not: tuple[str, str] | None
    """Why it does not train now, and what to do; None if a step is under way, or training is off."""

    def reached(self, stage: Stage) -> int:
        """Return how many trajectories reach a stage of the funnel."""
        return next(one.trajectories for one in self.stages if one.stage == stage)

    def drop_outs(self, *stages: Stage) -> list[DropOut]:
        """Return why trajectories do not reach these stages, the most frequent reason first."""
        of_them = [out for one in self.stages if one.stage in stages for out in one.drop_outs]
        return sorted(of_them, key=lambda out: -out.trajectories)


def milestones(facts: Facts) -> list[Milestone]:
    """Return all that a first step needs, in order."""
    return [*_milestones(facts)]


def current(steps: Sequence[Milestone]) -> int:
    """Return the place of the first milestone that is not there; the last one's if all are."""
    return next((place for place, one in enumerate(steps) if not one.is_there), len(steps) - 1)


def _milestones(facts: Facts) -> Iterator[Milestone]:
    recorded, usable = facts.reached("recorded"), facts.reached("usable")
    if not recorded:
        yield Milestone("Calls", False, "None is recorded yet.", None)
    else:
        lost = next(iter(facts.drop_outs("usable")), None)
        some = f"{usable:,} of {_attempts(recorded)} can be trained on."
        words = f"{_attempts(recorded)} recorded." if usable == recorded else some
        remedy, reason = (None, None) if lost is None else (lost.remedy, lost.reason)
        yield Milestone("Calls", bool(usable), words, remedy, reason)
    yield _groups(facts)
    rewarded = facts.reached("rewarded")
    words = f"{rewarded:,} of {_attempts(usable)} rewarded." if usable else "No attempt to reward yet."
    waits = next((out.reason for out in facts.drop_outs("ended", "rewarded")), None)
    remedy = None if rewarded and waits is None else _sentence(REMEDIES[Why.NO_REWARD])
    yield Milestone("Rewards", bool(rewarded), words, remedy, waits)
    yield _training(facts)
    yield _step(facts)


def _groups(facts: Facts) -> Milestone:
    if facts.groups:
        return Milestone("Groups", True, f"{_count(facts.groups, 'group')} of two or more attempts.", None)
    alone = facts.has_baseline and facts.reached("grouped") > 0
    words = "No two attempts are compared yet."
    remedy = _sentence(REMEDIES[Why.NO_GROUP])
    if facts.has_baseline:
        remedy += " An attempt alone is compared with a running mean, which takes many more of them."
    if alone:
        words = "No group: each attempt is compared with a running mean."
    return Milestone("Groups", alone, words, remedy)


def _training(facts: Facts) -> Milestone:
    if facts.state == "training":
        return Milestone("Training", True, "It is on.", None)
    words = "It is paused." if facts.state == "paused" else "It is off: calls are only recorded."
    return Milestone("Training", False, words, f"Choose Train, or run `whetstone policies train on {facts.policy}`.")


def _step(facts: Facts) -> Milestone:
    if facts.ready is None:
        words = f"It begins once {facts.groups_per_step} groups with different rewards are there."
        return Milestone("First step", False, words, f"`whetstone step {facts.policy}` takes one by hand.")
    what, do = facts.why_not or ("the step begins", "nothing: it ends by itself")
    return Milestone("First step", False, _sentence(what), _sentence(do))


def _sentence(words: str) -> str:
    """Return the words as a sentence; a command in them stays as it is."""
    return words[0].upper() + words[1:] + "."


def _attempts(number: int) -> str:
    return _count(number, "attempt")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
