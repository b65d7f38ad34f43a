"""Compute how far trajectories get on the way to a step, where the others drop out, and the remedies. Pure.

A trajectory drops out at the first stage that it does not reach, so each stage is a subset of the one before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from whetstone.domain.why_not_trained import WhyNotTrained as Why

Stage = Literal["recorded", "usable", "ended", "rewarded", "grouped", "scored", "trained"]

STAGES: tuple[tuple[Stage, str], ...] = (
    ("recorded", "Every trajectory that began in this time."),
    ("usable", "May be trained on: captured exactly, and nobody asked not to."),
    ("ended", "Over: by feedback, by an explicit end, or by idleness."),
    ("rewarded", "Feedback, a reward function or a judge said what it was worth."),
    ("grouped", "Has others, or a baseline, to be compared with."),
    ("scored", "Differs from what it is compared with: there is something to learn."),
    ("trained", "A step has trained on it."),
)
"""Name and meaning."""

ONGOING = "open"
"""Stands for a trajectory that is still open."""
CLAIMED = "claimed"
"""Stands for a trajectory that a step has claimed."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """Trajectories that did not reach a stage, for one reason."""

    reason: str
    meaning: str
    remedy: str
    waits: bool
    """Whether they may still reach it."""
    trajectories: int


@dataclass(frozen=True, slots=True)
class Reached:
    """A stage, and the trajectories that did not reach it."""

    stage: Stage
    meaning: str
    trajectories: int
    fallen: tuple[Fallen, ...]
    """The largest number first."""

    @property
    def lost(self) -> int:
        """Return how many reached the previous stage, but not this one."""
        return sum(one.trajectories for one in self.fallen)


_WAITS = frozenset({Why.NO_REWARD, Why.GROUP_OPEN, Why.NO_GROUP, Why.WAITING_STEP, Why.POLICY_NOT_TRAINING})

_FALLS: dict[Why, tuple[Stage, str]] = {
    Why.SPLIT_EVAL: ("usable", "As asked: leave out `X-Split: eval` where it should be learned from."),
    Why.NO_TRAIN: ("usable", "As asked: leave out `X-No-Train`, or `privacy.no_train` in the settings."),
    Why.OTHER_POLICY: ("usable", "Give calls to other policies, auxiliary ones too, a trajectory of their own."),
    Why.SUPERSEDED: ("usable", "Nothing: the retry took its place."),
    Why.TRAJECTORY_OVER: ("usable", "Post feedback after the last turn, or with `final: false`."),
    Why.DEMONSTRATION: ("usable", "A supervised step can imitate it: `whetstone step --imitate`."),
    Why.IMPORTED: ("usable", "A supervised step can imitate it: `whetstone step --imitate`."),
    Why.EMPTY: ("usable", "Nothing was said in it."),
    Why.GREEDY: ("usable", "Ask with a temperature above 0; 1.0 learns best."),
    Why.FIXED_SEED: ("usable", "Leave out seed, or vary it between attempts."),
    Why.SAMPLING_BENT: ("usable", "Leave out the parameter it names: only plain sampling can be weighed exactly."),
    Why.ABORTED: ("usable", "The app hung up: read streams to their end, raise the client's timeout."),
    Why.ERROR: ("usable", "See the completion's error; vLLM's log has more."),
    Why.NO_TOKEN_IDS: ("usable", "The server did not return ids: ask through chat or completions, without echo."),
    Why.NO_LOGPROBS: ("usable", "The server did not return logprobs: leave out echo, check its version."),
    Why.REDACTED: ("usable", "`privacy.keep_redacted_ids` trains on such calls, and keeps their text in ids."),
    Why.FAULT: ("usable", "Look into the judging worker's log and report it."),
    Why.NO_REWARD: ("rewarded", "Post feedback, name a reward function, or have a judge rank its group."),
    Why.GROUP_OPEN: ("grouped", "Wait for its siblings; `X-Group-Size` or `POST /v1/groups/{id}/close` ends that."),
    Why.NO_GROUP: ("grouped", "Send `X-Group-Id`, ask the same prompt several times, or keep a baseline."),
    Why.TOO_FEW: ("grouped", "Reward more attempts at the same thing, or keep a `learning.<policy>.baseline`."),
    Why.LATE: ("grouped", "Post rewards sooner, or raise `groups.deadline_s`."),
    Why.GROUP_UNIFORM: ("scored", "All did equally well: harder or easier tasks, finer rewards, more attempts."),
    Why.REWARD_TOO_LARGE: ("scored", "Keep rewards on one scale, such as 0 to 1."),
    Why.JUDGE_NOISE: ("scored", "The attempts look alike to the judge: a sharper rubric, or a better judge."),
    Why.WAITING_STEP: ("trained", "The next step takes it."),
    Why.POLICY_NOT_TRAINING: ("trained", "Let it train: `whetstone policies train on`."),
    Why.STEP_FAILED: ("trained", "See the step's error."),
    Why.ALREADY_TRAINED: ("trained", "Nothing: a step has trained on it."),
    Why.TOO_LONG: ("trained", "Raise `trainer.max_row_tokens`, as far as memory allows."),
    Why.STALE: ("trained", "Post rewards sooner, or raise `trainer.max_staleness`."),
    Why.OFF_LINEAGE: ("trained", "It was spoken by a version that was rolled back; nothing to do."),
}
"""Reason -> the first stage that such a trajectory does not reach, and the remedy."""


def funnel(counts: Iterable[tuple[str, str | None, int]]) -> list[Reached]:
    """Return the stages. `counts`: state, `why_not_trained` (without the part after a colon) and number."""
    fallen: dict[Stage, dict[str, int]] = {stage: {} for stage, _ in STAGES}
    total = 0
    for state, reason, trajectories in counts:
        total += trajectories
        if state != "trained":
            stage, named = _fell(state, reason)
            fallen[stage][named] = fallen[stage].get(named, 0) + trajectories
    reached, left = [], total
    for stage, meaning in STAGES:
        out = sorted((_fallen(name, count) for name, count in fallen[stage].items() if count > 0), key=_most_first)
        left -= sum(one.trajectories for one in out)
        reached.append(Reached(stage, meaning, left, tuple(out)))
    return reached


def remedy_of(reason: str | None) -> str | None:
    """Return the remedy for a reason; None if the reason is unknown."""
    known = _known(reason)
    return None if known is None else _FALLS[known][1]


def meaning_of(reason: str | None) -> str | None:
    """Return the meaning of a reason; None if the reason is unknown."""
    known = _known(reason)
    return None if known is None else known.meaning


def _fell(state: str, reason: str | None) -> tuple[Stage, str]:
    known = _known(reason)
    if state == "claimed":
        return "trained", CLAIMED
    if state == "open" and (known is None or known is Why.NO_REWARD):
        return "ended", ONGOING
    if known is None:
        return ("rewarded", Why.NO_REWARD.value) if not reason else ("usable", reason)
    return _FALLS[known][0], known.value


def _fallen(reason: str, trajectories: int) -> Fallen:
    if reason == ONGOING:
        return Fallen(reason, "It goes on.", "It ends by feedback, an explicit end, or idleness.", True, trajectories)
    if reason == CLAIMED:
        return Fallen(reason, "A step has it now.", "Wait for the step's end.", True, trajectories)
    known = _known(reason)
    if known is None:
        return Fallen(reason, "Another version of Whetstone wrote this reason.", "", False, trajectories)
    return Fallen(reason, known.meaning, _FALLS[known][1], known in _WAITS, trajectories)


def _known(reason: str | None) -> Why | None:
    name = (reason or "").partition(":")[0]
    return next((one for one in Why if one.value == name), None)


def _most_first(one: Fallen) -> tuple[int, str]:
    return (-one.trajectories, one.reason)
