"""SQL of deletions: the requests, which trajectories they cover, and which versions were trained on those.

Each function is part of a transaction of its caller. `rows` deletes what belongs to a trajectory.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, and_, bindparam, func, or_, select, text, union_all

from migrations import schema
from whetstone.config.privacy import pseudonym
from whetstone.database.engine import chunks
from whetstone.domain.ids import SHADOW, new_id, version_id

Kind = Literal["trajectory", "user", "age"]
SEARCH_LIMIT = 10_000
"""Trajectories that one search by age returns; the next search returns more."""

t, c, e, g, x = (
    schema.trajectories.c,
    schema.completions.c,
    schema.evaluations.c,
    schema.groups.c,
    schema.examples.c,
)
s, m, r, v = schema.steps.c, schema.step_trajectories.c, schema.erasures.c, schema.policy_versions.c

# Built once: it runs in every transaction that writes calls.
_REQUESTED_SINCE = (
    select(r.project, r.target, r.asked_at)
    .where(r.asked_at >= bindparam("since"), r.kind != "age")
    .order_by(r.asked_at)
)

Versions = Mapping[str, Collection[int]]
"""Policy -> its versions."""


@dataclass(frozen=True)
class Target:
    """What to delete within a project."""

    project: str
    kind: Kind
    name: str
    """The trajectory's id, the user's name, or the time, in ISO format, before which everything is deleted."""

    @property
    def stored(self) -> str:
        """The target as stored in the table of erasures: never a user's name."""
        return pseudonym(self.name) if self.kind == "user" else self.name

    @property
    def users(self) -> tuple[str, str]:
        """The names under which the tables may store the user."""
        return self.name, pseudonym(self.name)


@dataclass(frozen=True)
class Erasure:
    """A deletion in progress."""

    id: str
    project: str
    kind: Kind
    target: str
    """As stored in the table."""
    requested_at: datetime
    waits_for: tuple[str, ...] | None
    """Trajectories still to be deleted; None until they are known."""


def open_erasure(connection: Connection, target: Target, now: datetime) -> Erasure:
    """Record a deletion request. Calls from before it that are not in the tables yet are no longer written.

    An unfinished request for the same target is continued.
    """
    same = (r.project == target.project, r.kind == target.kind, r.target == target.stored, r.finished_at.is_(None))
    existing_id = connection.execute(select(r.id).where(*same).order_by(r.asked_at).limit(1)).scalar()
    erasure_id = str(existing_id or new_id())
    if existing_id is None:
        row = {"project": target.project, "id": erasure_id, "kind": target.kind, "target": target.stored}
        counts = {"trajectories": 0, "completions": 0, "versions": {}, "asked_at": now}
        connection.execute(schema.erasures.insert().values(row | counts))
    else:
        connection.execute(schema.erasures.update().where(*_is(target.project, erasure_id)).values(asked_at=now))
    return Erasure(erasure_id, target.project, target.kind, target.stored, now, None)


def await_writers(connection: Connection) -> None:
    """Wait until no transaction writes calls without having seen what was committed before. Use a separate transaction.

    On SQLite there is no other writer meanwhile.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("LOCK TABLE completions IN SHARE MODE"))


def announce_writer(connection: Connection) -> None:
    """Make `await_writers` wait for this transaction. Writers of calls run it before they check what was deleted."""
    if connection.dialect.name == "postgresql":
        # The lock that the first insert would take anyway.
        connection.execute(text("LOCK TABLE completions IN ROW EXCLUSIVE MODE"))


def requested_since(connection: Connection, since: datetime) -> dict[tuple[str, str], datetime]:
    """Return project and target of the deletions requested since then, with the times; not those by age."""
    return {(row.project, row.target): row.asked_at for row in connection.execute(_REQUESTED_SINCE, {"since": since})}


def unfinished(connection: Connection, project: str, before: datetime) -> list[Erasure]:
    """Return the deletions that were requested before then and are not finished."""
    columns = (r.id, r.project, r.kind, r.target, r.asked_at, r.waits_for)
    query = select(*columns).where(r.project == project, r.finished_at.is_(None), r.asked_at < before)
    rows = connection.execute(query.order_by(r.asked_at, r.id))
    return [Erasure(*row[:-1], None if row.waits_for is None else tuple(row.waits_for)) for row in rows]


def find(connection: Connection, target: Target, requested_at: datetime, limit: int | None = SEARCH_LIMIT) -> list[str]:
    """Return the trajectories to delete, with those derived from them (`_made_of`); by age, the oldest `limit`.

    A trajectory that began after the request is another one, even under the same id.
    """
    here = (t.project == target.project, t.created_at <= requested_at)
    if target.kind == "age":
        before = datetime.fromisoformat(target.name)
        # No trajectory was last seen before it began, and they are sorted by beginning.
        old = (*here, t.created_at < before, t.last_seen_at < before)
        ids = connection.scalars(select(t.id).where(*old).order_by(t.created_at).limit(limit)).all()
    elif target.kind == "user":
        by_calls = select(c.trajectory_id).where(c.project == target.project, c.end_user.in_(target.users))
        begun = select(t.id).where(*here, t.end_user.in_(target.users))
        ids = connection.scalars(union_all(begun, by_calls.where(c.created_at <= requested_at))).all()
    else:
        ids = connection.scalars(select(t.id).where(*here, t.id == target.name)).all()
    return _made_of(connection, target.project, ids, copies_only=target.kind == "age")


def note_waiting(connection: Connection, erasure: Erasure, ids: Sequence[str]) -> None:
    """Record what is still to be deleted, so that any process can continue."""
    is_it = _is(erasure.project, erasure.id)
    connection.execute(schema.erasures.update().where(*is_it).values(waits_for=list(ids)))


def add(connection: Connection, erasure: Erasure, trajectories: int, completions: int, versions: Versions) -> None:
    """Add to the counts of what was deleted and to the versions that were trained on it."""
    is_it = _is(erasure.project, erasure.id)
    before = connection.execute(select(r.versions).where(*is_it)).scalar_one()
    more = {"trajectories": r.trajectories + trajectories, "completions": r.completions + completions}
    connection.execute(schema.erasures.update().where(*is_it).values(more | {"versions": _merged(before, versions)}))


def close_erasure(connection: Connection, erasure: Erasure, waits_for: Sequence[str], now: datetime) -> dict[str, Any]:
    """Finish the deletion, or let it wait for steps. The versions of the row then include all descendants of those
    trained on the data. Returns the row."""
    is_it = _is(erasure.project, erasure.id)
    versions = connection.execute(select(r.versions).where(*is_it)).scalar_one()
    values = {
        "versions": descended(connection, erasure.project, versions),
        "waits_for": list(waits_for) or None,
        "finished_at": None if waits_for else now,
    }
    connection.execute(schema.erasures.update().where(*is_it).values(values))
    return dict(connection.execute(select(schema.erasures).where(*is_it)).one()._mapping)


def count(connection: Connection, project: str, ids: Collection[str]) -> tuple[int, list[str], dict[str, list[int]]]:
    """Return for these trajectories: how many completions, which a step has claimed, and which versions learned from
    them."""
    completions, waiting = 0, list[str]()
    versions: dict[str, list[int]] = {}
    for some in chunks(ids):
        here = (c.project == project, c.trajectory_id.in_(some))
        counted = select(func.count()).select_from(schema.completions).where(*here)
        completions += int(connection.execute(counted).scalar_one())
        waiting += taken(connection, project, some)
        versions = _merged(versions, learned(connection, project, some))
    return completions, waiting, descended(connection, project, versions)


def taken(connection: Connection, project: str, ids: Collection[str]) -> list[str]:
    """Return those that a step which is not over has claimed or imitates."""
    claimed = select(t.id).where(t.project == project, t.id.in_(ids), t.state == "claimed")
    of_step = and_(s.project == x.project, s.policy == x.policy, s.number == x.step, s.ended_at.is_(None))
    imitated = select(x.trajectory_id).join(schema.steps, of_step).where(x.project == project, x.trajectory_id.in_(ids))
    return sorted(connection.scalars(claimed.union(imitated)))


def learned(connection: Connection, project: str, ids: Collection[str]) -> dict[str, list[int]]:
    """Return the versions of steps that trained on these, including the versions of a step's lost attempts."""
    of_step = and_(s.project == m.project, s.id == m.step_id)
    taught = select(s.policy, s.number).join(schema.step_trajectories, of_step)
    weighed = taught.where(m.project == project, m.trajectory_id.in_(ids), m.advantage.is_not(None))
    # An example stores the last step that took it and its creation time: any step between may have taken it.
    between = and_(
        s.project == x.project,
        s.policy == x.policy,
        s.kind == "sft",
        s.number <= x.step,
        or_(s.ended_at.is_(None), s.ended_at >= x.created_at),
    )
    shown = select(s.policy, s.number).join(schema.examples, between)
    imitated = shown.where(x.project == project, x.trajectory_id.in_(ids), x.left_out.is_(None))
    steps: defaultdict[str, list[int]] = defaultdict(list)
    for policy, number in connection.execute(weighed.union(imitated)):
        steps[policy].append(number)
    made = select(v.version).where(v.project == project).order_by(v.version)
    return {
        policy: list(connection.scalars(made.where(v.policy == policy, v.step.in_(numbers))))
        for policy, numbers in sorted(steps.items())
    }


def descended(connection: Connection, project: str, versions: Versions) -> dict[str, list[int]]:
    """Return these versions and all that descend from them: by steps, and as copies in other policies."""
    if not any(versions.values()):
        return {}
    columns = (v.id, v.policy, v.version, v.parent, v.origin)
    rows = connection.execute(select(*columns).where(v.project == project).order_by(v.policy, v.version)).all()
    seen = {version_id(policy, version) for policy, several in versions.items() for version in several}
    before = 0
    while len(seen) > before:
        before = len(seen)
        seen |= {row.id for row in rows if row.origin in seen or version_id(row.policy, row.parent or 0) in seen}
    by_policy: defaultdict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.id in seen:
            by_policy[row.policy].append(row.version)
    return dict(by_policy)


def failed_row_files(connection: Connection, project: str, ids: Collection[str]) -> list[Path]:
    """Return files that contain their rows, written by steps whose numbers were not finite."""
    of_step = and_(m.project == s.project, m.step_id == s.id, m.trajectory_id.in_(ids))
    rows = select(s.kept).join(schema.step_trajectories, of_step).where(s.project == project, s.kept.is_not(None))
    return [Path(one) for one in sorted(set(connection.scalars(rows)))]


def _made_of(connection: Connection, project: str, ids: Collection[str], *, copies_only: bool) -> list[str]:
    """Return these trajectories and those that contain their content.

    These are the ones that the proxy sampled from their prompts; and, unless `copies_only`, the other choices of their
    calls, their forks and continuations, and retries, in either direction.
    """
    known, new = set(ids), set(ids)
    while new:
        related: set[str] = set()
        for some in chunks(new):
            for query in _relatives(project, some, copies_only=copies_only):
                related.update(connection.scalars(query))
        new = related - known
        known |= new
    return sorted(known)


def _relatives(project: str, ids: Sequence[str], *, copies_only: bool) -> Iterable[Any]:
    here = (c.project == project, c.trajectory_id.in_(ids))
    of_shadow = and_(g.project == t.project, g.id == t.group_id, g.formed_by == "shadow")
    drawn_for = (t.project == project, t.group_id.in_([one + SHADOW for one in ids]))
    yield select(t.id).join(schema.groups, of_shadow).where(*drawn_for)
    source = and_(c.project == e.project, c.id == e.source_id)
    drawn = and_(t.project == e.project, t.id == e.trajectory_id)
    tested = schema.evaluations.join(schema.completions, source).join(schema.trajectories, drawn)
    yield select(t.id).select_from(tested).where(*here)
    if copies_only:
        return
    gone_on = schema.completions.join(schema.trajectories, and_(t.project == c.project, t.continues == c.id))
    yield select(t.id).select_from(gone_on).where(*here)
    other = schema.completions.alias("other")
    o = other.c

    def others(on: ColumnElement[bool]) -> Any:
        joined = schema.completions.join(other, and_(o.project == c.project, on))
        return select(o.trajectory_id).select_from(joined).where(*here)

    # The id of a further choice is the first one's, a dot, and its index.
    yield others(and_(o.upstream_id == c.upstream_id, o.id.startswith(c.id + "."))).where(c.choice == 0)
    yield others(o.id == c.retry_of).where(c.retry_of.is_not(None))
    yield others(o.retry_of == c.id).where(o.retry_of.is_not(None))


def _is(project: str, erasure_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return r.project == project, r.id == erasure_id


def _merged(one: Versions, other: Versions) -> dict[str, list[int]]:
    return {policy: sorted({*one.get(policy, ()), *other.get(policy, ())}) for policy in sorted({*one, *other})}
