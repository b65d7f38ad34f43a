"""The SQL around judges: groups they are to rank, what was said in them, judgements, and what a day took.

Locks are taken in the judge's order: feedback, groups, trajectories. Nothing here is held while a judge thinks: a group
is taken for a while (a lease: `judge_due_at` moves into the future), and only who still holds it writes to it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, func, select

from judge.facts import UNCLAIMED
from judge.ruler.conversation import Turn
from judge.store import IS_ATTEMPT, columns_of
from migrations import schema
from migrations.database import chunks, insert_new
from whetstone.reasons import WhyNotTrained

f, g, t, c = schema.feedback.c, schema.groups.c, schema.trajectories.c, schema.completions.c
j, d = schema.judgements.c, schema.judge_days.c

_STANDING = (f.state.in_(("waiting", "applied")), f.withdrawn_at.is_(None))
"""Of feedback: it is neither withdrawn nor superseded, and no step has used or left it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A group that is held until `until`."""

    project: str
    id: str
    policy: str
    asked_at: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class Asked:
    """The feedback that asks for the ranking."""

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
    def said(self) -> tuple[str, int, str | None, bool]:
        """What changes when it goes on, is joined by others, or is looked at by reward functions."""
        return self.id, self.completions, self.tail_completion_id, self.code_due_at is None


@dataclass(frozen=True, slots=True)
class Judgement:
    """One that the group needs, as it stands."""

    id: str
    state: str
    judge: str
    scores: Mapping[str, Any] | None
    calls: int
    refusals: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What one call took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None


def take(connection: Connection, now: datetime, until: datetime) -> Taken | None:
    """The group that judges are to look at and that is due longest; held until `until`."""
    query = select(g.project, g.id, g.policy, g.judge_asked_at).where(g.judge_due_at <= now, g.state == "closed")
    locked = query.order_by(g.judge_due_at).limit(1).with_for_update(skip_locked=True, key_share=True)
    row = connection.execute(locked).one_or_none()
    if row is None:
        return None
    is_one = (g.project == row.project, g.id == row.id)
    connection.execute(schema.groups.update().where(*is_one).values(judge_due_at=until))
    return Taken(*row, until)


def forget_over(connection: Connection, now: datetime) -> None:
    """Groups that are closed no more are not due for judges either."""
    over = (g.judge_due_at <= now, g.state.not_in(UNCLAIMED))
    connection.execute(schema.groups.update().where(*over).values(judge_due_at=None))


def hold(connection: Connection, group: Taken, until: datetime, waits: str | None = None) -> bool:
    """Hold the group until then, if it is held still; whether it was. `waits`: why it is not ranked yet."""
    values: dict[str, Any] = {"judge_due_at": until, "judge_waits": waits}
    return connection.execute(schema.groups.update().where(*_held(group)).values(values)).rowcount == 1


def asked(connection: Connection, group: Taken) -> Asked | None:
    """The last feedback that asks to rank it and stands."""
    query = select(f.id, f.judge, f.created_at).where(*_requests(group), *_STANDING)
    row = connection.execute(query.order_by(f.created_at.desc(), f.id.desc()).limit(1)).one_or_none()
    if row is None:
        return None
    said = row.judge or {}
    return Asked(row.id, said.get("model"), said.get("rubric"), row.created_at)


def members(connection: Connection, group: Taken) -> list[Member]:
    """Its trajectories that have said something, by id; not those that a retry superseded."""
    columns = (t.id, t.task, t.reward_source, t.code_parts, t.code_due_at, t.completions, t.tail_completion_id)
    tail = (c.project == t.project) & (c.id == t.tail_completion_id)
    in_group = (t.project == group.project, t.group_id == group.id, t.completions > 0)
    query = select(*columns, func.coalesce(c.status, "complete") != "complete")
    joined = query.select_from(schema.trajectories.join(schema.completions, tail, isouter=True))
    return [Member(*row) for row in connection.execute(joined.where(*in_group, IS_ATTEMPT).order_by(t.id))]


def turns(connection: Connection, project: str, trajectory_id: str) -> list[Turn]:
    """What was said in it, turn by turn; without what a retry superseded."""
    columns = (c.follows, c.new_messages, c.response, c.response_text, c.tools)
    is_one = (c.project == project, c.trajectory_id == trajectory_id)
    said = c.why_not_trained.is_distinct_from(WhyNotTrained.SUPERSEDED.value)
    rows = connection.execute(select(*columns).where(*is_one, said).order_by(c.turn))
    return [
        Turn(row.follows is not None, row.new_messages or [], row.response, row.response_text, row.tools)
        for row in rows
    ]


def open_judgements(
    connection: Connection, project: str, rubric: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Judgement]:
    """Add those that are not there yet, with their rubric; all of them as they stand, by id."""
    there = judgements(connection, project, [row["id"] for row in rows])
    if missing := [row for row in rows if row["id"] not in there]:
        insert_new(connection, schema.rubrics, {"project": project, **rubric})
        for row in missing:
            insert_new(connection, schema.judgements, {"project": project, **row})
        there |= judgements(connection, project, [row["id"] for row in missing])
    return there


def judgements(connection: Connection, project: str, ids: Sequence[str]) -> dict[str, Judgement]:
    """Those of these that are there, by id."""
    query = select(*columns_of(schema.judgements, Judgement)).where(j.project == project)
    rows = (row for some in chunks(ids) for row in connection.execute(query.where(j.id.in_(some))))
    return {row.id: Judgement(*row) for row in rows}


def accepted_before(connection: Connection, project: str, cache_key: str) -> dict[str, Any] | None:
    """What an accepted judgement of the same attempts said, by the same judge and rubric; `cached_from` is its id."""
    columns = (j.id.label("cached_from"), j.scores, j.model, j.left_out)
    row = connection.execute(select(*columns).where(j.project == project, j.cache_key == cache_key).limit(1)).first()
    return None if row is None else dict(row._mapping)


def accept(
    connection: Connection, project: str, judgement_id: str, values: Mapping[str, Any], spent: Spent | None
) -> bool:
    """Store what was accepted, unless something was before; whether it was. `spent`: what its call took, if any."""
    is_one = (j.project == project, j.id == judgement_id, j.state == "waiting")
    changed = {"state": "accepted", "error": None, **(_more(spent) if spent else {}), **values}
    return connection.execute(schema.judgements.update().where(*is_one).values(changed)).rowcount == 1


def note(
    connection: Connection, project: str, judgement_id: str, judge: str, refusals: int, error: str, spent: Spent
) -> None:
    """Store that a call gave nothing, and who is asked next."""
    is_one = (j.project == project, j.id == judgement_id, j.state == "waiting")
    values = {"judge": judge, "refusals": refusals, "error": error, **_more(spent)}
    connection.execute(schema.judgements.update().where(*is_one).values(values))


def count_day(
    connection: Connection, project: str, policy: str, judge: str, day: str, outcome: str, spent: Spent
) -> None:
    """Add one call to its day. `outcome`: accepted, refused or failed."""
    key = {"project": project, "policy": policy, "day": day, "judge": judge}
    insert_new(
        connection, schema.judge_days, key | dict.fromkeys(("calls", "refused", "failed", "tokens", "cost_usd"), 0)
    )
    is_one = [schema.judge_days.c[name] == value for name, value in key.items()]
    more = {
        "calls": d.calls + 1,
        "refused": d.refused + int(outcome == "refused"),
        "failed": d.failed + int(outcome == "failed"),
        "tokens": d.tokens + spent.prompt_tokens + spent.completion_tokens,
        "cost_usd": d.cost_usd + (spent.cost_usd or 0.0),
    }
    connection.execute(schema.judge_days.update().where(*is_one).values(more))


def spent_on(connection: Connection, project: str, policy: str, day: str) -> tuple[float, int]:
    """US dollars and tokens that judging the policy took on that day."""
    query = select(func.coalesce(func.sum(d.cost_usd), 0.0), func.coalesce(func.sum(d.tokens), 0))
    cost, tokens = connection.execute(query.where(d.project == project, d.policy == policy, d.day == day)).one()
    return float(cost), int(tokens)


def decide_again(connection: Connection, group: Taken, now: datetime) -> None:
    """Nobody asks for its ranking any more: whether it is ranked at all is decided anew."""
    values = {"judge_asked_at": None, "judge_due_at": None, "judge_waits": None, "due_at": now}
    connection.execute(schema.groups.update().where(*_held(group)).values(values))


def is_withdrawn(connection: Connection, project: str, feedback_id: str) -> bool:
    """Whether the app has taken back what this feedback says."""
    query = select(f.id).where(f.project == project, f.id == feedback_id, f.withdrawn_at.is_not(None))
    return connection.execute(query).first() is not None


def lock(connection: Connection, group: Taken) -> Literal[False] | datetime | None:
    """Lock the requests that wait, then the group; since when it is to be ranked. False: it is held no more.

    What was applied is locked by whoever has its group.
    """
    requests = select(f.id).where(*_requests(group), f.state == "waiting").order_by(f.id)
    connection.execute(requests.with_for_update(key_share=True)).all()
    held = select(g.judge_asked_at).where(*_held(group)).with_for_update(key_share=True)
    row = connection.execute(held).one_or_none()
    return False if row is None else row.judge_asked_at


def write_scores(connection: Connection, project: str, feedback: Mapping[str, Any]) -> bool:
    """Write the row of feedback, new or there; whether it stands. The caller has locked its group."""
    if insert_new(connection, schema.feedback, {"project": project, **feedback}, on=["project", "id"]):
        return True
    changed = {name: feedback[name] for name in ("rewards", "state", "reason", "due_at")}
    this = (f.project == project, f.id == feedback["id"], *_STANDING)
    return connection.execute(schema.feedback.update().where(*this).values(changed)).rowcount == 1


def supersede_requests(connection: Connection, group: Taken, feedback: Mapping[str, Any]) -> None:
    """Earlier requests to rank the same group are answered with this one. The caller has locked them."""
    earlier = (*_requests(group), f.state == "waiting", f.id != feedback["id"], f.created_at <= feedback["created_at"])
    connection.execute(schema.feedback.update().where(*earlier).values(state="superseded", reason=None, due_at=None))


def judged(connection: Connection, group: Taken, noise: float | None, reviewed: Collection[str], now: datetime) -> None:
    """Note that the group is ranked, and whom people are to look at. The caller has locked it."""
    values = {"judge_due_at": None, "judged_at": now, "judge_noise": noise, "judge_waits": None, "due_at": now}
    connection.execute(schema.groups.update().where(*_held(group)).values(values))
    drawn = (t.project == group.project, t.id.in_(sorted(reviewed)), t.review_at.is_(None))
    if reviewed:
        connection.execute(schema.trajectories.update().where(*drawn).values(review_at=now))


def _requests(group: Taken) -> tuple[Any, ...]:
    return f.project == group.project, f.target_kind == "group", f.target_id == group.id, f.source == "judge"


def _held(group: Taken) -> tuple[Any, ...]:
    return g.project == group.project, g.id == group.id, g.state == "closed", g.judge_due_at == group.until


def _more(spent: Spent) -> dict[str, Any]:
    more: dict[str, Any] = {
        "calls": j.calls + 1,
        "prompt_tokens": j.prompt_tokens + spent.prompt_tokens,
        "completion_tokens": j.completion_tokens + spent.completion_tokens,
    }
    if spent.cost_usd is not None:
        more["cost_usd"] = func.coalesce(j.cost_usd, 0.0) + spent.cost_usd
    return more
