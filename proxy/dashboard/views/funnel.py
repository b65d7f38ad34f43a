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
    ("usable", "May be trained on: recorded exactly, and not excluded by the app or the settings."),
    ("ended", "Ended by feedback, by an explicit end, or after it was idle."),
    ("rewarded", "Has a reward from feedback, a reward function or a judge."),
    ("grouped", "Can be compared with other attempts, or with a baseline."),
    ("scored", "Its reward differs from what it is compared with, so there is something to learn."),
    ("trained", "A step has trained on it."),
)
"""Name and meaning."""

ONGOING = "open"
"""Stands for a trajectory that is still open."""
CLAIMED = "claimed"
"""Stands for a trajectory that a step has claimed."""


@dataclass(frozen=True, slots=True)
class DropOut:
    """Trajectories that did not reach a stage, for one reason."""

    reason: str
    meaning: str
    remedy: str
    waits: bool
    """Whether they may still reach it."""
    trajectories: int


@dataclass(frozen=True, slots=True)
class FunnelStage:
    """A stage, and the trajectories that did not reach it."""

    stage: Stage
    meaning: str
    trajectories: int
    drop_outs: tuple[DropOut, ...]
    """The largest number first."""


_WAITS = frozenset({Why.NO_REWARD, Why.GROUP_OPEN, Why.NO_GROUP, Why.WAITING_STEP, Why.POLICY_NOT_TRAINING})

_FALLS: dict[Why, tuple[Stage, str]] = {
    Why.SPLIT_EVAL: ("usable", "Intended. To train on such calls, leave out `X-Split: eval`."),
    Why.NO_TRAIN: (
        "usable",
        "Intended. To train on such calls, leave out `X-No-Train`, or `privacy.no_train` in the settings.",
    ),
    Why.OTHER_POLICY: ("usable", "Give calls to other policies, auxiliary calls too, a trajectory of their own."),
    Why.SUPERSEDED: ("usable", "Nothing to do: the retry replaced it."),
    Why.TRAJECTORY_OVER: ("usable", "Post feedback after the last turn, or with `final: false`."),
    Why.DEMONSTRATION: ("usable", "A supervised step can imitate it: `whetstone step --imitate`."),
    Why.IMPORTED: ("usable", "A supervised step can imitate it: `whetstone step --imitate`."),
    Why.EMPTY: ("usable", "Nothing to do: it has no completion."),
    Why.GREEDY: ("usable", "Use a temperature above 0 (1.0 learns best), or let the policy explore."),
    Why.FIXED_SEED: ("usable", "Leave out seed, or vary it between attempts."),
    Why.SAMPLING_BENT: (
        "usable",
        "Leave out the field that the reason names: no one can compute again what it does, or it is unknown.",
    ),
    Why.MEDIA: ("usable", "Give calls with text only a trajectory of their own: those can be trained on."),
    Why.ABORTED: ("usable", "The app hung up: read streams to their end, raise the client's timeout."),
    Why.ERROR: ("usable", "See the completion's error; vLLM's log has more."),
    Why.NO_TOKEN_IDS: ("usable", "The server did not return ids: use chat or completions, without echo."),
    Why.NO_LOGPROBS: ("usable", "The server did not return logprobs: leave out echo, check its version."),
    Why.REDACTED: ("usable", "`privacy.keep_redacted_ids` trains on such calls, and keeps their text in ids."),
    Why.FAULT: ("usable", "Find the error in the judging worker's log and report it."),
    Why.NO_REWARD: ("rewarded", "Post feedback, name a reward function, or have a judge rank its group."),
    Why.GROUP_OPEN: ("grouped", "Wait for its siblings; `X-Group-Size` or `POST /v1/groups/{id}/close` ends the wait."),
    Why.NO_GROUP: ("grouped", "Send `X-Group-Id`, send the same prompt several times, or use a baseline."),
    Why.TOO_FEW: ("grouped", "Reward more attempts at the same task, or use a `learning.<policy>.baseline`."),
    Why.LATE: ("grouped", "Post rewards sooner, or raise `groups.deadline_s`."),
    Why.GROUP_UNIFORM: (
        "scored",
        "All rewards are equal: try harder or easier tasks, finer rewards, or more attempts.",
    ),
    Why.REWARD_TOO_LARGE: ("scored", "Keep rewards on one scale, such as 0 to 1."),
    Why.JUDGE_NOISE: (
        "scored",
        "The judge cannot tell the attempts apart: use a more precise rubric, or a better judge.",
    ),
    Why.WAITING_STEP: ("trained", "The next step takes it."),
    Why.POLICY_NOT_TRAINING: ("trained", "Turn training on: `whetstone policies train on`."),
    Why.STEP_FAILED: ("trained", "See the step's error."),
    Why.ALREADY_TRAINED: ("trained", "Nothing to do: a step has trained on it."),
    Why.CONSTRAINED: ("trained", "Leave more to choose: fewer strict tools and formats, a larger `top_p` or `top_k`."),
    Why.CUT_OFF: ("trained", "Ask for more tokens (`max_tokens`), or set `trainer.cut_off`."),
    Why.TOO_LONG: ("trained", "Raise `trainer.max_row_tokens`, as far as memory allows."),
    Why.STALE: ("trained", "Post rewards sooner, or raise `trainer.max_staleness`."),
    Why.OFF_LINEAGE: ("trained", "Nothing to do: the version that sampled it was rolled back."),
}
"""Reason -> the first stage that such a trajectory does not reach, and the remedy."""


def funnel(counts: Iterable[tuple[str, str | None, int]]) -> list[FunnelStage]:
    """Return the stages. `counts`: state, `why_not_trained` (without the part after a colon) and number."""
    drop_outs: dict[Stage, dict[str, int]] = {stage: {} for stage, _ in STAGES}
    total = 0
    for state, reason, trajectories in counts:
        total += trajectories
        if state != "trained":
            stage, named = _drop_out_stage(state, reason)
            drop_outs[stage][named] = drop_outs[stage].get(named, 0) + trajectories
    stages, left = [], total
    for stage, meaning in STAGES:
        out = sorted((_drop_out(name, count) for name, count in drop_outs[stage].items() if count > 0), key=_most_first)
        left -= sum(one.trajectories for one in out)
        stages.append(FunnelStage(stage, meaning, left, tuple(out)))
    return stages


def remedy_of(reason: str | None) -> str | None:
    """Return the remedy for a reason; None if the reason is unknown."""
    known = _known(reason)
    return None if known is None else _FALLS[known][1]


def meaning_of(reason: str | None) -> str | None:
    """Return the meaning of a reason; None if the reason is unknown."""
    known = _known(reason)
    return None if known is None else known.meaning


def _drop_out_stage(state: str, reason: str | None) -> tuple[Stage, str]:
    known = _known(reason)
    if state == "claimed":
        return "trained", CLAIMED
    if state == "open" and (known is None or known is Why.NO_REWARD):
        return "ended", ONGOING
    if known is None:
        return ("rewarded", Why.NO_REWARD.value) if not reason else ("usable", reason)
    return _FALLS[known][0], known.value


def _drop_out(reason: str, trajectories: int) -> DropOut:
    if reason == ONGOING:
        return DropOut(
            reason,
            "It has not ended yet.",
            "It ends by feedback, by an explicit end, or after it is idle.",
            True,
            trajectories,
        )
    if reason == CLAIMED:
        return DropOut(reason, "A step is using it now.", "Wait for the step's end.", True, trajectories)
    known = _known(reason)
    if known is None:
        return DropOut(reason, "Another version of Whetstone wrote this reason.", "", False, trajectories)
    return DropOut(reason, known.meaning, _FALLS[known][1], known in _WAITS, trajectories)


def _known(reason: str | None) -> Why | None:
    name = (reason or "").partition(":")[0]
    return next((one for one in Why if one.value == name), None)


def _most_first(one: DropOut) -> tuple[int, str]:
    return (-one.trajectories, one.reason)
