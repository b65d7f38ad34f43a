"""SQL of deletions: the requests, which trajectories they cover, and which versions were trained on those.

Each function is part of a transaction of its caller. `eraser` deletes what belongs to a trajectory.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Executable, and_, bindparam, func, or_, select, text, union_all

from migrations import schema
from whetstone.config.privacy import pseudonym
from whetstone.config.trainer import BY_EXAMPLE
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
    existing_id = connection.scalar(
        select(r.id)
        .where(r.project == target.project, r.kind == target.kind, r.target == target.stored, r.finished_at.is_(None))
        .order_by(r.asked_at)
        .limit(1)
    )
    erasure = Erasure(str(existing_id or new_id()), target.project, target.kind, target.stored, now, None)
    if existing_id is None:
        connection.execute(
            schema.erasures.insert().values(
                project=target.project,
                id=erasure.id,
                kind=target.kind,
                target=target.stored,
                trajectories=0,
                completions=0,
                versions={},
                asked_at=now,
            )
        )
    else:
        update(connection, erasure, asked_at=now)
    return erasure


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
    rows = connection.execute(
        select(r.id, r.project, r.kind, r.target, r.asked_at, r.waits_for)
        .where(r.project == project, r.finished_at.is_(None), r.asked_at < before)
        .order_by(r.asked_at, r.id)
    )
    return [Erasure(*row[:-1], None if row.waits_for is None else tuple(row.waits_for)) for row in rows]


def find(connection: Connection, target: Target, requested_at: datetime, limit: int | None = SEARCH_LIMIT) -> list[str]:
    """Return the trajectories to delete, with those derived from them (`_made_of`); by age, the oldest `limit`.

    A trajectory that began after the request is another one, even under the same id.
    """
    here = (t.project == target.project, t.created_at <= requested_at)
    if target.kind == "age":
        before = datetime.fromisoformat(target.name)
        # No trajectory was last seen before it began, and they are sorted by beginning.
        query: Executable = (
            select(t.id)
            .where(*here, t.created_at < before, t.last_seen_at < before)
            .order_by(t.created_at)
            .limit(limit)
        )
    elif target.kind == "user":
        by_calls = select(c.trajectory_id).where(c.project == target.project, c.end_user.in_(target.users))
        begun = select(t.id).where(*here, t.end_user.in_(target.users))
        query = union_all(begun, by_calls.where(c.created_at <= requested_at))
    else:
        query = select(t.id).where(*here, t.id == target.name)
    return _made_of(connection, target.project, connection.scalars(query).all(), copies_only=target.kind == "age")


def add(connection: Connection, erasure: Erasure, trajectories: int, completions: int, versions: Versions) -> None:
    """Add to the counts of what was deleted and to the versions that were trained on it."""
    update(
        connection,
        erasure,
        trajectories=r.trajectories + trajectories,
        completions=r.completions + completions,
        versions=_merged(_versions(connection, erasure), versions),
    )


def close_erasure(connection: Connection, erasure: Erasure, waits_for: Sequence[str], now: datetime) -> dict[str, Any]:
    """Finish the deletion, or let it wait for steps. The versions of the row then include all descendants of those
    trained on the data. Returns the row."""
    update(
        connection,
        erasure,
        versions=descended(connection, erasure.project, _versions(connection, erasure)),
        waits_for=list(waits_for) or None,
        finished_at=None if waits_for else now,
    )
    return _row(connection, erasure)


def count(connection: Connection, project: str, ids: Collection[str]) -> tuple[int, list[str], dict[str, list[int]]]:
    """Return for these trajectories: how many completions, which a step has claimed, and which versions learned from
    them."""
    completions, waiting, versions = 0, list[str](), dict[str, list[int]]()
    for some in chunks(ids):
        here = (c.project == project, c.trajectory_id.in_(some))
        completions += connection.execute(select(func.count(c.id)).where(*here)).scalar_one()
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
    weighed = (
        select(s.policy, s.number)
        .join(schema.step_trajectories, and_(s.project == m.project, s.id == m.step_id))
        .where(m.project == project, m.trajectory_id.in_(ids), m.advantage.is_not(None))
    )
    # An example stores the last step that took it and its creation time: any step between may have taken it.
    between = and_(
        s.project == x.project,
        s.policy == x.policy,
        or_(s.kind.in_(BY_EXAMPLE), s.imitates.is_not(None)),  # steps on rewards may imitate past attempts beside
        s.number <= x.step,
        or_(s.ended_at.is_(None), s.ended_at >= x.created_at),
    )
    imitated = (
        select(s.policy, s.number)
        .join(schema.examples, between)
        .where(x.project == project, x.trajectory_id.in_(ids), x.left_out.is_(None))
    )
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
    rows = connection.execute(
        select(v.id, v.policy, v.version, v.parent, v.origin).where(v.project == project).order_by(v.policy, v.version)
    ).all()
    seen = {version_id(policy, version) for policy, several in versions.items() for version in several}
    before = 0
    while len(seen) > before:
        before = len(seen)
        seen |= {row.id for row in rows if row.origin in seen or version_id(row.policy, row.parent or 0) in seen}
    related = groupby((row for row in rows if row.id in seen), key=lambda row: str(row.policy))
    return {policy: [row.version for row in of_policy] for policy, of_policy in related}


def failed_row_files(connection: Connection, project: str, ids: Collection[str]) -> list[Path]:
    """Return files that contain their rows, written by steps whose numbers were not finite."""
    files = connection.scalars(
        select(s.kept)
        .join(schema.step_trajectories, and_(m.project == s.project, m.step_id == s.id))
        .where(s.project == project, m.trajectory_id.in_(ids), s.kept.is_not(None))
    )
    return [Path(one) for one in sorted(set(files))]


def _made_of(connection: Connection, project: str, ids: Collection[str], *, copies_only: bool) -> list[str]:
    """Return these trajectories and those that contain their content.

    These are the ones that the proxy sampled from their prompts; and, unless `copies_only`, the other choices of their
    calls, their forks and continuations, and retries, in either direction.
    """
    known, new = set(ids), set(ids)
    while new:
        queries = (query for some in chunks(new) for query in _relatives(project, some, copies_only=copies_only))
        new = {related for query in queries for related in connection.scalars(query)} - known
        known |= new
    return sorted(known)


def _relatives(project: str, ids: Sequence[str], *, copies_only: bool) -> Iterable[Any]:
    here = (c.project == project, c.trajectory_id.in_(ids))
    of_shadow = and_(g.project == t.project, g.id == t.group_id, g.formed_by == "shadow")
    drawn_for = t.group_id.in_([one + SHADOW for one in ids])
    yield select(t.id).join(schema.groups, of_shadow).where(t.project == project, drawn_for)
    source = and_(c.project == e.project, c.id == e.source_id)
    drawn = and_(t.project == e.project, t.id == e.trajectory_id)
    yield select(t.id).join(schema.evaluations, drawn).join(schema.completions, source).where(*here)
    if copies_only:
        return
    yield select(t.id).join(schema.completions, and_(t.project == c.project, t.continues == c.id)).where(*here)
    other = schema.completions.alias("other")
    o = other.c

    def others(on: ColumnElement[bool]) -> Any:
        return select(o.trajectory_id).join(schema.completions, and_(o.project == c.project, on)).where(*here)

    # The id of a further choice is the first one's, a dot, and its index.
    yield others(and_(o.upstream_id == c.upstream_id, o.id.startswith(c.id + "."))).where(c.choice == 0)
    yield others(o.id == c.retry_of).where(c.retry_of.is_not(None))
    yield others(o.retry_of == c.id).where(o.retry_of.is_not(None))


def _versions(connection: Connection, erasure: Erasure) -> Versions:
    # Alone: `waits_for` may hold 100,000 ids, and this is read for each batch.
    versions: Versions = connection.execute(
        select(r.versions).where(r.project == erasure.project, r.id == erasure.id)
    ).scalar_one()
    return versions


def _row(connection: Connection, erasure: Erasure) -> dict[str, Any]:
    query = select(schema.erasures).where(r.project == erasure.project, r.id == erasure.id)
    return dict(connection.execute(query).one()._mapping)


def update(connection: Connection, erasure: Erasure, **values: Any) -> None:
    """Update the erasure's row."""
    is_it = (r.project == erasure.project, r.id == erasure.id)
    connection.execute(schema.erasures.update().where(*is_it).values(**values))


def _merged(one: Versions, other: Versions) -> dict[str, list[int]]:
    return {policy: sorted({*one.get(policy, ()), *other.get(policy, ())}) for policy in sorted({*one, *other})}
