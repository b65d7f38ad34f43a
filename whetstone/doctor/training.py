"""Say why a policy does not train at the moment, with a remedy, and what its training has gained. Pure.

The trainer decides by itself when a step is due (`trainer.domain.triggers`), from every member of every group. These
sentences come from counts. `whetstone step --dry-run` shows the trainer's own choice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from whetstone.config.trainer import TrainerSettings
from whetstone.domain import gains
from whetstone.domain.stats import FEWEST_REWARDS, sample_of
from whetstone.domain.why_not_trained import WhyNotTrained as Why

DAYS = 7
"""Days of attempts that are counted."""
MANY_UNIFORM = 0.5
"""Share of the newest groups from which on their equal rewards are a reason that nothing trains."""
LATE_S = 60
"""Seconds after which a due step should have begun: the training worker looks every few seconds."""

Row = Mapping[str, Any]
Rewards = Mapping[tuple[str, int], tuple[int, float, float]]
"""(split, version) -> number, sum and sum of squares of the rewards."""
REMEDIES = {
    Why.NO_REWARD: "post feedback, name a reward function, or let a judge rank the groups (`whetstone docs feedback`)",
    Why.NO_GROUP: "send X-Group-Id, send the same prompt several times, or use a baseline (`whetstone docs groups`)",
    Why.TOO_FEW: "reward more attempts at the same task, or use a `learning.<policy>.baseline`",
    Why.LATE: "post rewards sooner, or raise `groups.deadline_s`",
    Why.GROUP_UNIFORM: "try harder or easier tasks, finer rewards, or more attempts at each",
    Why.GREEDY: "use a temperature above 0 (1.0 learns best), or let the policy explore (`whetstone docs recipes`)",
    Why.SPLIT_EVAL: "leave out `X-Split: eval` where calls may be trained on",
    Why.NO_TRAIN: "leave out `X-No-Train`, or `privacy.no_train` in the settings, where calls may be trained on",
    Why.ERROR: "`whetstone logs vllm` may say why calls fail",
}
PHASES = {
    "starting": "wait: the terminal of `whetstone up` says what it does, `whetstone logs vllm` what vLLM does",
    "stopping": "wait: its last processes still run; then `whetstone up` starts it again",
}
"""What to do while the processes of a stack start or stop."""
LAUNCHES = (
    "`SELECT * FROM admin_launches ORDER BY launch DESC` has all launches; `whetstone logs trainer` what their command "
    "printed"
)
ELSEWHERE = "`whetstone docs why_not_trained` explains it; `whetstone trajectories --why {reason}` lists them"


@dataclass(frozen=True)
class ScoredGroups:
    """The groups that wait for a step."""

    groups: int
    """Groups whose rewards differ."""
    singles: int
    """Attempts that are compared with a baseline."""
    uniform: int
    """Groups whose rewards are equal: no step takes them."""
    oldest: datetime | None
    """When the first of those that can be trained on closed; None if there is none."""
    recent: int = 0
    """The newest groups with rewards that have closed, whatever became of them."""
    recent_uniform: int = 0
    """Those of them whose rewards are all equal."""

    def worth(self, trainer: TrainerSettings) -> float:
        """Return how many of the groups that start a step are there; single attempts count in part."""
        return self.groups + self.singles * trainer.groups_per_step / trainer.singles_per_step


@dataclass(frozen=True)
class Stack:
    """What runs, as far as training depends on it."""

    runs: bool
    trainer_alive: bool | None
    """None if the processes are not known, as where containers run them."""
    url: str | None
    """The proxy's."""
    phase: str | None = None
    """`starting` or `stopping`, if its processes do one of these; None if they run or none does."""
    launch: str | None = None
    """What the launcher did last; None where a training worker always runs."""


def why_not(
    policy: Row, scored: ScoredGroups, was_called: bool, trainer: TrainerSettings, stack: Stack, now: datetime
) -> tuple[str, str] | None:
    """Return why the policy does not train now, and what to do; None while a step trains.

    The first reason that applies is returned, from the stack to the calls.
    """
    name, step = policy["policy"], policy["last_step"]
    if stack.phase is not None and not stack.runs:
        return f"the stack is {stack.phase}", PHASES[stack.phase]
    if not stack.runs:
        return "the stack is down", "start it with `whetstone up`, or name its folder with --data"
    if policy["state"] != "training":
        is_only = "training is paused" if policy["state"] == "paused" else "calls are only recorded"
        return is_only, f"`whetstone policies train on {name}`"
    if stack.trainer_alive is False:
        return "the training worker is dead", "`up` starts it again; `whetstone logs trainer` says why it ended"
    if step is not None and step["ended_at"] is None:
        if step["state"] != "waiting_gate":
            return None
        tested = "its version" if step["version_out"] is None else f"version {step['version_out']}"
        return (
            f"step {step['step']} waits for the tests of {tested}",
            f"nothing: it ends by itself; `whetstone versions {name}` shows the tests",
        )
    if policy["step_asked_at"] is not None:
        if stack.launch is not None:
            return f"a step is requested; {stack.launch}", LAUNCHES
        return "a step is requested, and waits for the training worker", "`whetstone logs trainer` says what it does"
    if scored.groups or scored.singles:
        return _of_scored(name, scored, policy, trainer, stack, now)
    return _of_groups(scored, policy["groups"], policy["attempts"]) or _of_attempts(policy, was_called, stack)


def uniform_groups(policy: Row, scored: ScoredGroups, trainer: TrainerSettings) -> tuple[str, str] | None:
    """Return how many groups teach nothing because their rewards are equal, and what to do; None where that is not why
    the policy does not train."""
    is_short = scored.worth(trainer) < trainer.groups_per_step
    share = scored.recent_uniform / scored.recent if scored.recent else 0.0
    if policy["state"] != "training" or not is_short or share < MANY_UNIFORM:
        return None
    what = f"the rewards are all equal in {scored.recent_uniform} of the last {_count(scored.recent, 'closed group')}"
    return f"{what} ({share:.0%}), and no step takes those", REMEDIES[Why.GROUP_UNIFORM]


@dataclass(frozen=True)
class Attempts:
    """How the attempts of a version are read; only those of versions that are compared are."""

    held_out: Callable[[int], gains.ByPrompt]
    """The held-out rewards of a version, by prompt."""
    training_prompts: Callable[[int], Sequence[str]]
    """Hashes of a version's first prompts in training, one for each attempt."""


def gain(rewards: Rewards, before: int, after: int, attempts: Attempts) -> dict[str, Any] | None:
    """Return by how much the mean reward of version `after` exceeds that of `before`, with its 95 % interval.

    Held-out attempts are compared if both versions have FEWEST_REWARDS rewards of them, paired by prompt as on the
    policy's page; else those in training, with `same_prompts`: whether both versions had the same prompts. None if
    neither split has enough.
    """
    for split in ("eval", "train") if after != before else ():
        both = [rewards.get((split, version), (0, 0.0, 0.0)) for version in (before, after)]
        counts = [count for count, _, _ in both]
        if min(counts) < FEWEST_REWARDS:
            continue
        is_paired = split == "eval" and gains.may_be_paired(*counts)
        by_prompt = [attempts.held_out(version) if is_paired else {} for version in (before, after)]
        result = gains.gain(sample_of(*both[0]), sample_of(*both[1]), *by_prompt)
        same_prompts = None
        if split == "train":
            same_prompts = gains.had_same_prompts(*(attempts.training_prompts(version) for version in (before, after)))
        return {
            "version": after,
            "over": before,
            "split": split,
            "rewarded": counts,
            "pairs": result.pairs,
            "same_prompts": same_prompts,
            **asdict(result.difference),
        }
    return None


def _of_scored(
    name: str, scored: ScoredGroups, policy: Row, trainer: TrainerSettings, stack: Stack, now: datetime
) -> tuple[str, str]:
    by_hand = f"`whetstone step {name}` trains on what is there"
    worth = scored.worth(trainer)
    if trainer.schedule is not None:
        return f"{_places(worth)} scored groups wait for the schedule, {trainer.schedule} (UTC)", by_hand
    if worth < trainer.groups_per_step:
        singles = f" ({scored.singles} single attempts count in part)" if scored.singles else ""
        waiting = policy["groups"]["open"] + policy["groups"]["closed"]
        coming = f"; {waiting} more wait for members or rewards" if waiting else ""
        what = f"{_places(worth)} of the {trainer.groups_per_step} scored groups that start a step"
        return f"{what} are there{singles}{coming}", f"wait for more, lower `trainer.groups_per_step`, or {by_hand}"
    times = [time for time in (scored.oldest, policy["live_since"]) if time is not None]
    waited_s = (now - max(times, default=now)).total_seconds()
    if waited_s < trainer.fresh_waits_s + LATE_S:
        return (
            "enough scored groups are there; the step begins, or waits for answers of the live version",
            f"nothing: it waits for them {trainer.fresh_waits_s:g} s at most (`trainer.fresh_waits_s`)",
        )
    if stack.launch is not None:
        return f"enough scored groups are there; {stack.launch}", LAUNCHES
    return (
        "enough scored groups are there, and no step has begun",
        f"`whetstone step {name} --dry-run` says what a step would take; `whetstone logs trainer` what the worker does",
    )


def _of_groups(scored: ScoredGroups, groups: Mapping[str, int], attempts: Mapping[str, int]) -> tuple[str, str] | None:
    if scored.uniform:
        return f"the rewards within all {scored.uniform} scored groups are equal", REMEDIES[Why.GROUP_UNIFORM]
    waiting = groups["open"] + groups["closed"]
    if waiting and not attempts.get(Why.GROUP_OPEN):
        return f"no attempt has a reward yet, in {_count(waiting, 'group')}", REMEDIES[Why.NO_REWARD]
    if groups["open"]:
        return (
            f"members, or rewards of some, are missing in {_count(groups['open'], 'group')}",
            "reward the attempts; X-Group-Size, or POST /v1/groups/{id}/close, ends the wait for members",
        )
    if groups["closed"]:
        return f"rewards of some members are missing in {_count(groups['closed'], 'group')}", REMEDIES[Why.NO_REWARD]
    return None


def _of_attempts(policy: Row, was_called: bool, stack: Stack) -> tuple[str, str]:
    name, counts = policy["policy"], policy["attempts"]
    base = f"{stack.url or 'http://HOST:PORT'}/v1"
    total = sum(counts.values())
    if not total:
        since = f"in the last {DAYS} days" if was_called else "yet"
        return f"no call has been recorded {since}", f'set your app\'s base_url to {base} and its model to "{name}"'
    left_out = {reason: number for reason, number in counts.items() if reason not in ("trained", "claimed")}
    if not left_out:
        return f"all {_count(total, 'attempt')} of the last {DAYS} days are trained on", "send more calls"
    reason, number = next(iter(left_out.items()))
    if reason in ("open", Why.NO_REWARD):
        unrewarded = left_out.get("open", 0) + left_out.get(Why.NO_REWARD, 0)
        return f"no reward is known of {unrewarded} of the last {_count(total, 'attempt')}", REMEDIES[Why.NO_REWARD]
    known = next((one for one in Why if one == reason), None)
    meaning = reason if known is None else f"{reason} ({known.meaning.rstrip('.')})"
    remedy = None if known is None else REMEDIES.get(known)
    what = f"{number} of the last {_count(total, 'attempt')} {'is' if number == 1 else 'are'} left out: {meaning}"
    return what, remedy or ELSEWHERE.format(reason=reason)


def _places(worth: float) -> str:
    return f"{worth:.1f}".removesuffix(".0")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
