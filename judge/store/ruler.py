"""The SQL for judges: groups to rank, their conversations, judgements, and the costs of a day.

Locks are taken in the judge's order: feedback, groups, trajectories. No lock is held while a judge answers: a group is
leased (`judge_due_at` moves into the future), and only the worker that still has the lease writes to it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, func, select

from judge.decisions.model import UNCLAIMED, Turn
from judge.store.unit_of_work import IS_ATTEMPT, columns_of, rows_of, update_rows
from migrations import schema
from whetstone.database.engine import chunks, insert_new
from whetstone.domain.why_not_trained import WhyNotTrained
from whetstone.registry.spending import day_of

f, g, t, c = schema.feedback.c, schema.groups.c, schema.trajectories.c, schema.completions.c
j, d = schema.judgements.c, schema.judge_days.c

_STANDING = (f.state.in_(("waiting", "applied")), f.withdrawn_at.is_(None))
"""Condition on feedback: it is neither withdrawn nor superseded, and no step has used it or left it out."""


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A group that is leased until `until`."""

    project: str
    id: str
    policy: str
    requested_at: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class RankingRequest:
    """The feedback that requests the ranking."""

    id: str
    judge: str | None
    rubric: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory that may be ranked."""

    id: str
    task: str | None
    reward_source: str | None
    code_parts: Mapping[str, float] | None
    code_due_at: datetime | None
    completions: int
    tail_completion_id: str | None
    broken_off: bool
    """Its last completion failed or was aborted."""

    @property
    def facts(self) -> tuple[str, int, str | None, bool]:
        """The fields that change when it continues, when others join it, or when reward functions run on it."""
        return self.id, self.completions, self.tail_completion_id, self.code_due_at is None


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judgement that the group needs, with its present state."""

    id: str
    state: str
    judge: str
    scores: Mapping[str, Any] | None
    calls: int
    refusals: int


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None


def take(connection: Connection, now: datetime, until: datetime) -> LeasedGroup | None:
    """Lease the group that has been due for judges for the longest time, until `until`; None without one."""
    query = select(g.project, g.id, g.policy, g.judge_asked_at).where(g.judge_due_at <= now, g.state == "closed")
    locked = query.order_by(g.judge_due_at).limit(1).with_for_update(skip_locked=True, key_share=True)
    row = connection.execute(locked).one_or_none()
    if row is None:
        return None
    update_rows(connection, schema.groups, g.project == row.project, g.id == row.id, judge_due_at=until)
    return LeasedGroup(*row, until)


def forget_over(connection: Connection, now: datetime) -> None:
    """Clear the due time of groups that are past ranking."""
    update_rows(connection, schema.groups, g.judge_due_at <= now, g.state.not_in(UNCLAIMED), judge_due_at=None)


def hold(connection: Connection, group: LeasedGroup, until: datetime, waits: str | None = None) -> bool:
    """Extend the lease to `until`, if it still exists; return whether it did. `waits`: why it is not ranked yet."""
    return update_rows(connection, schema.groups, *_leased(group), judge_due_at=until, judge_waits=waits) == 1


def ranking_request(connection: Connection, group: LeasedGroup) -> RankingRequest | None:
    """Return the last valid feedback that requests its ranking."""
    query = select(f.id, f.judge, f.created_at).where(*_requests(group), *_STANDING)
    row = connection.execute(query.order_by(f.created_at.desc(), f.id.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    judge = row.judge or {}
    return RankingRequest(row.id, judge.get("model"), judge.get("rubric"), row.created_at)


def members(connection: Connection, group: LeasedGroup) -> list[Member]:
    """Return its trajectories with completions, by id; without those that a retry superseded."""
    columns = (t.id, t.task, t.reward_source, t.code_parts, t.code_due_at, t.completions, t.tail_completion_id)
    tail = (c.project == t.project) & (c.id == t.tail_completion_id)
    query = (
        select(*columns, func.coalesce(c.status, "complete") != "complete")
        .select_from(schema.trajectories.join(schema.completions, tail, isouter=True))
        .where(t.project == group.project, t.group_id == group.id, t.completions > 0, IS_ATTEMPT)
    )
    return [Member(*row) for row in connection.execute(query.order_by(t.id))]


def turns(connection: Connection, project: str, trajectory_id: str) -> list[Turn]:
    """Return the trajectory's turns, in order; without those that a retry superseded."""
    is_current = c.why_not_trained.is_distinct_from(WhyNotTrained.SUPERSEDED.value)
    query = (
        select(c.follows, c.new_messages, c.response, c.response_text, c.tools)
        .where(c.project == project, c.trajectory_id == trajectory_id, is_current)
        .order_by(c.turn)
    )
    return [Turn(follows is not None, new or [], *answer) for follows, new, *answer in connection.execute(query)]


def open_judgements(
    connection: Connection, project: str, rubric: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, Judgement]:
    """Add the missing judgements, with their rubric; return all of them with their present state. Both are by id."""
    there = judgements(connection, project, rows)
    if missing := [name for name in rows if name not in there]:
        insert_new(connection, schema.rubrics, {"project": project, **rubric})
        for name in missing:
            insert_new(connection, schema.judgements, {"project": project, "id": name, **rows[name]})
        there |= judgements(connection, project, missing)
    return there


def judgements(connection: Connection, project: str, ids: Collection[str]) -> dict[str, Judgement]:
    """Return those of these judgements that exist, by id."""
    query = select(*columns_of(schema.judgements, Judgement)).where(j.project == project)
    return {row.id: Judgement(*row) for row in rows_of(connection, query, j.id, ids)}


def accepted_before(connection: Connection, project: str, cache_key: str) -> dict[str, Any] | None:
    """Return an accepted judgement of the same attempts by the same judge and rubric; `cached_from` is its id."""
    query = select(j.id.label("cached_from"), j.scores, j.model, j.left_out).limit(1)
    row = connection.execute(query.where(j.project == project, j.cache_key == cache_key)).mappings().first()
    return None if row is None else dict(row)


def accept(
    connection: Connection, group: LeasedGroup, judgement_id: str, values: Mapping[str, Any], spent: Spent | None
) -> Mapping[str, Any]:
    """Store an accepted answer, unless there is one; return the scores that count.

    `spent`: the cost of its call, if any; it is counted in any case.
    """
    changed = {"state": "accepted", "error": None, **(_more(spent) if spent else {}), **values}
    accepted = update_rows(connection, schema.judgements, *_awaited(group, judgement_id), **changed) == 1
    if spent is not None:
        count_day(connection, group, values["judge"], values["accepted_at"], "accepted", spent)
    scores: Mapping[str, Any] | None = values["scores"]
    if not accepted:
        scores = judgements(connection, group.project, [judgement_id])[judgement_id].scores
    assert scores is not None
    return scores


def note(
    connection: Connection,
    group: LeasedGroup,
    judgement_id: str,
    values: Mapping[str, Any],
    judge: str,
    now: datetime,
    outcome: str,
    spent: Spent,
) -> None:
    """Store that a call to `judge` gave nothing; `values`: which judge is next, and why. `outcome`: as for a day."""
    update_rows(connection, schema.judgements, *_awaited(group, judgement_id), **values, **_more(spent))
    count_day(connection, group, judge, now, outcome, spent)


def count_day(
    connection: Connection, group: LeasedGroup, judge: str, now: datetime, outcome: str, spent: Spent
) -> None:
    """Add one call to its day. `outcome`: accepted, refused or failed."""
    key = {"project": group.project, "policy": group.policy, "day": day_of(now), "judge": judge}
    insert_new(
        connection, schema.judge_days, key | dict.fromkeys(("calls", "refused", "failed", "tokens", "cost_usd"), 0)
    )
    more = {
        "calls": d.calls + 1,
        "refused": d.refused + int(outcome == "refused"),
        "failed": d.failed + int(outcome == "failed"),
        "tokens": d.tokens + spent.prompt_tokens + spent.completion_tokens,
        "cost_usd": d.cost_usd + (spent.cost_usd or 0.0),
    }
    connection.execute(schema.judge_days.update().filter_by(**key).values(more))


def spent_on(connection: Connection, project: str, policy: str, day: str) -> tuple[float, int]:
    """Return the US dollars and tokens that judging the policy cost on that day."""
    query = select(func.coalesce(func.sum(d.cost_usd), 0.0), func.coalesce(func.sum(d.tokens), 0))
    cost, tokens = connection.execute(query.where(d.project == project, d.policy == policy, d.day == day)).one()
    return float(cost), int(tokens)


def decide_again(connection: Connection, group: LeasedGroup, now: datetime) -> None:
    """Clear a request that no longer exists: whether the group is ranked at all is decided again."""
    update_rows(
        connection, schema.groups, *_leased(group), judge_asked_at=None, judge_due_at=None, judge_waits=None, due_at=now
    )


def is_withdrawn(connection: Connection, project: str, feedback_id: str) -> bool:
    """Return whether the app has withdrawn this feedback."""
    query = select(f.id).where(f.project == project, f.id == feedback_id, f.withdrawn_at.is_not(None))
    return connection.execute(query).first() is not None


def lock(connection: Connection, group: LeasedGroup) -> Literal[False] | datetime | None:
    """Lock the waiting requests, then the group; return since when it has to be ranked. False: the lease is over.

    Applied feedback is protected by the lock on its group.
    """
    requests = select(f.id).where(*_requests(group), f.state == "waiting").order_by(f.id)
    connection.execute(requests.with_for_update(key_share=True)).all()
    leased = select(g.judge_asked_at).where(*_leased(group)).with_for_update(key_share=True)
    row = connection.execute(leased).one_or_none()
    return False if row is None else row.judge_asked_at


def write_scores(connection: Connection, project: str, feedback: Mapping[str, Any]) -> bool:
    """Insert or update the row of feedback; return whether it is valid. The caller has locked its group."""
    if insert_new(connection, schema.feedback, {"project": project, **feedback}, on=["project", "id"]):
        return True
    changed = {name: feedback[name] for name in ("rewards", "state", "reason", "due_at")}
    is_one = (f.project == project, f.id == feedback["id"], *_STANDING)
    return update_rows(connection, schema.feedback, *is_one, **changed) == 1


def supersede_requests(connection: Connection, group: LeasedGroup, feedback: Mapping[str, Any]) -> None:
    """Mark earlier requests to rank the same group as superseded by this one. The caller has locked them."""
    earlier = (*_requests(group), f.state == "waiting", f.id != feedback["id"], f.created_at <= feedback["created_at"])
    update_rows(connection, schema.feedback, *earlier, state="superseded", reason=None, due_at=None)


def judged(
    connection: Connection, group: LeasedGroup, noise: float | None, reviewed: Collection[str], now: datetime
) -> None:
    """Record that the group is ranked, and which trajectories people have to review. The caller has locked it."""
    update_rows(
        connection,
        schema.groups,
        *_leased(group),
        judge_due_at=None,
        judged_at=now,
        judge_noise=noise,
        judge_waits=None,
        due_at=now,
    )
    for ids in chunks(reviewed):
        drawn = (t.project == group.project, t.id.in_(ids), t.review_at.is_(None))
        update_rows(connection, schema.trajectories, *drawn, review_at=now)


def _requests(group: LeasedGroup) -> tuple[Any, ...]:
    return f.project == group.project, f.target_kind == "group", f.target_id == group.id, f.source == "judge"


def _leased(group: LeasedGroup) -> tuple[Any, ...]:
    return g.project == group.project, g.id == group.id, g.state == "closed", g.judge_due_at == group.until


def _awaited(group: LeasedGroup, judgement_id: str) -> tuple[Any, ...]:
    return j.project == group.project, j.id == judgement_id, j.state == "waiting"


def _more(spent: Spent) -> dict[str, Any]:
    cost = {} if spent.cost_usd is None else {"cost_usd": func.coalesce(j.cost_usd, 0.0) + spent.cost_usd}
    return {
        "calls": j.calls + 1,
        "prompt_tokens": j.prompt_tokens + spent.prompt_tokens,
        "completion_tokens": j.completion_tokens + spent.completion_tokens,
        **cost,
    }
