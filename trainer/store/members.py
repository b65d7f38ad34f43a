"""Read a step's trajectories from SQL: their trainable completions, or why there are none. Reads only."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, and_, func, literal, null, select

from migrations import schema
from trainer.domain.claims import Claim, Member, why_silent
from trainer.domain.constraints import Constraints
from trainer.domain.eligible_groups import Candidate
from trainer.domain.examples.followups import are_tool_results
from trainer.domain.rows import SampledCompletion
from trainer.store.parts import read_parts
from trainer.store.turn_scores import read_turn_credit
from whetstone.config.rewards import RewardSettings
from whetstone.database.engine import chunks
from whetstone.domain.states import FEEDBACK_SOURCES

COLDEST = 0.01
"""The lowest temperature that vLLM samples with, for any lower setting (`_MAX_TEMP` of its sampling parameters)."""
ON_ONE_SCALE = ("trajectory", "completions", "steps", "code", "failure")
"""Sources of rewards that mean the same in every group. Those that an app or a judge gave to a group as a whole may be
ranks, which say nothing beyond it.
"""


@dataclass(frozen=True, slots=True)
class _TrainableCompletions:
    """The completions of a trajectory that its step can use; the fields are those of Member."""

    completions: tuple[SampledCompletion, ...]
    silent: str | None
    seed: tuple[int, int] | None


def read_members(
    connection: Connection, claim: Claim, learning: RewardSettings | None = None, *, tools: bool = False
) -> list[Member]:
    """Return the step's trajectories with whole prompts, in a fixed order.

    `learning`: the settings by whose weights the parts of rewards add up; None: parts are not read. `tools`: read which
    tokens tools gave.
    """
    s, g = schema.step_trajectories.c, schema.groups.c
    query = (
        select(s.trajectory_id, s.group_id, s.reward, s.baseline, g.compared_with)
        .join(schema.groups, and_(g.project == s.project, g.id == s.group_id))
        .where(s.project == claim.project, s.step_id == claim.id)
    )
    members = [
        Member(
            row.trajectory_id,
            row.group_id,
            row.reward,
            (),
            alone=row.compared_with == "baseline",
            baseline=row.baseline,
        )
        for row in connection.execute(query).all()
    ]
    return _with_completions(connection, claim.project, claim.policy, members, learning, tools)


def read_candidate_members(
    connection: Connection,
    project: str,
    policy: str,
    candidates: Iterable[Candidate],
    baselines: Mapping[str, float],
    learning: RewardSettings | None = None,
) -> list[Member]:
    """Return the members of candidates, as a step that took them would read them. `learning`: see `read_members`."""
    members = [
        Member(
            one.trajectory_id,
            group.group_id,
            one.reward,
            (),
            alone=group.alone,
            baseline=baselines.get(one.trajectory_id),
        )
        for group in candidates
        for one in group.members
    ]
    return _with_completions(connection, project, policy, members, learning)


def _with_completions(
    connection: Connection,
    project: str,
    policy: str,
    members: Iterable[Member],
    learning: RewardSettings | None,
    tools: bool = False,
) -> list[Member]:
    """Return the members with their completions. Sorted here: databases differ in how they compare texts."""
    in_order = sorted(members, key=lambda member: (member.group_id, member.trajectory_id))
    ids = [member.trajectory_id for member in in_order]
    scales = _reward_scales(connection, project, ids)
    ends = _ends(connection, project, ids)
    judged_ids = [trajectory_id for trajectory_id, (_, judged) in ends.items() if judged]
    step_rewards = {**_step_rewards(connection, project, ids), **read_turn_credit(connection, project, judged_ids)}
    parts = {} if learning is None else read_parts(connection, project, ids, learning)
    with_completions = []
    for member in in_order:
        collected = _collect(connection.execute(_completions(project, member.trajectory_id, tools)), policy)
        cut_off, judged = ends.get(member.trajectory_id, (False, False))
        with_completions.append(
            replace(
                member,
                completions=collected.completions,
                silent=collected.silent,
                seed=collected.seed,
                reward_scale=scales.get(member.trajectory_id),
                cut_off=cut_off,
                judged=judged,
                step_rewards=step_rewards.get(member.trajectory_id, {}),
                parts=parts.get(member.trajectory_id, {}),
            )
        )
    return with_completions


def _reward_scales(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, str]:
    """Return the scale of each reward that may be compared across groups: its task, the app's label.

    The reward of a trajectory whose group was given to a judge may be, or contain, the judge's score; it has no scale.
    """
    t, f = schema.trajectories.c, schema.feedback.c
    # A literal, not a bound value: else neither database uses the partial index.
    of_group = f.target_kind == literal("group", literal_execute=True)
    judged = select(f.id).where(of_group, f.project == t.project, f.target_id == t.group_id, f.source == "judge")
    scales: dict[str, str] = {}
    for some in chunks(trajectory_ids):
        query = select(t.id, func.coalesce(t.task, "")).where(t.project == project, t.id.in_(some))
        absolute = query.where(t.reward_source.in_(ON_ONE_SCALE), ~judged.exists())
        scales |= {row.id: row[1] for row in connection.execute(absolute)}
    return scales


def _ends(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, tuple[bool, bool]]:
    """Return, by trajectory, whether a length limit ended its last completion, and whether a judge gave its reward."""
    t, c = schema.trajectories.c, schema.completions.c
    query = (
        select(t.id, c.finish_reason, t.reward_source)
        .join(schema.completions, and_(c.project == t.project, c.id == t.tail_completion_id), isouter=True)
        .where(t.project == project)
    )
    return {
        row.id: (row.finish_reason == "length", row.reward_source == "judge")
        for some in chunks(trajectory_ids)
        for row in connection.execute(query.where(t.id.in_(some)))
    }


def _step_rewards(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, dict[int, float]]:
    """Return what was earned at each turn, by trajectory: the last feedback on a completion counts, as for its reward.

    A veto, or the reward of a failure, replaces all of it. A claim freezes a trajectory's feedback, so a step that is
    taken over reads the same.
    """
    t, f, c = schema.trajectories.c, schema.feedback.c, schema.completions.c
    query = (
        select(f.trajectory_id, c.id, c.turn, f.reward)
        .join(schema.completions, and_(c.project == f.project, c.id == f.completion_id))
        .join(schema.trajectories, and_(t.project == f.project, t.id == f.trajectory_id))
        .where(f.project == project, f.credit == "step", f.reward.is_not(None))
        .where(f.state.in_(("applied", "used")), t.reward_source.in_(FEEDBACK_SOURCES))
        .order_by(f.created_at, f.id)
    )
    last: dict[tuple[str, str], tuple[int, float]] = {}
    for some in chunks(trajectory_ids):
        for trajectory_id, completion_id, turn, reward in connection.execute(query.where(f.trajectory_id.in_(some))):
            last[trajectory_id, completion_id] = turn, reward
    earned: dict[str, dict[int, float]] = {}
    for (trajectory_id, _), (turn, reward) in last.items():
        of_turns = earned.setdefault(trajectory_id, {})
        of_turns[turn] = of_turns.get(turn, 0.0) + reward
    return earned


def _completions(project: str, trajectory_id: str, tools: bool) -> Any:
    c = schema.completions.c
    added = c.new_messages if tools else null().label("new_messages")
    columns = (added, c.id, c.turn, c.follows, c.choice, c.policy, c.policy_version, c.prompt_token_ids, c.token_ids)
    return (
        select(*columns, c.inference_logprobs, c.sampling, c.why_not_trained, c.constraints, c.explored)
        .where(c.project == project, c.trajectory_id == trajectory_id)
        .order_by(c.turn)
    )


def _collect(completions: Iterable[Any], policy: str) -> _TrainableCompletions:
    """Collect completions, given in turn order.

    A completion that cannot be trained on is still part of the prompt of later completions.
    """
    whole: dict[str, tuple[int, ...]] = {}
    sampled: list[SampledCompletion] = []
    reasons: list[tuple[str, str | None]] = []
    seed: tuple[int, int] | None = None
    for row in completions:
        if row.prompt_token_ids is not None and row.token_ids is not None:
            prompt_ids = (*whole.get(row.follows, ()), *row.prompt_token_ids)
            whole[row.id] = (*prompt_ids, *row.token_ids)
            if row.why_not_trained is None and row.policy == policy:
                if not sampled:
                    seed = _seed(row)
                sampled.append(_sampled_completion(row, prompt_ids))
                continue
        reasons.append((row.policy, row.why_not_trained))
    return _TrainableCompletions(tuple(sampled), None if sampled else why_silent(policy, reasons), seed)


def _sampled_completion(row: Any, prompt_ids: tuple[int, ...]) -> SampledCompletion:
    sampling = row.sampling or {}
    temperature = sampling.get("temperature") if row.explored is None else row.explored
    constraints = row.constraints and Constraints.of(row.constraints, sampling.get("stop_token_ids") or ())
    return SampledCompletion(
        completion_id=row.id,
        prompt_ids=prompt_ids,
        token_ids=tuple(row.token_ids),
        logprobs=tuple(row.inference_logprobs),
        version=row.policy_version,
        temperature=1.0 if temperature is None else max(float(temperature), COLDEST),
        constraints=constraints or None,
        turn=row.turn,
        tool_tokens=len(row.prompt_token_ids) if row.follows and are_tool_results(row.new_messages or ()) else 0,
    )


def _seed(row: Any) -> tuple[int, int] | None:
    # A call that explores is sampled without its seed.
    seed = (row.sampling or {}).get("seed") if row.explored is None else None
    return None if seed is None else (seed, row.choice)
