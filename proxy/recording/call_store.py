"""The proxy's SQL for calls: write served calls into trajectories, completions and groups.

A call is left out if its deletion was requested before it reached the tables.

Many calls need few statements: the rows to be changed are locked at once, counted in memory, and written at once. A
trajectory that begins here is inserted with the counts of all its calls.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, Table, bindparam, select

from migrations import schema
from proxy import tuning
from proxy.domain.call import Call
from proxy.recording.prefix_delta import Tail, Tails, tail_of, turn_delta
from proxy.recording.retry_store import retried_completions, supersede
from proxy.recording.rows import (
    CompletionRow,
    Key,
    NewCompletion,
    TrajectoryCounts,
    TrajectoryRow,
    answer_ids,
    completion_row,
    group_row,
    new_completions,
    trajectory_row,
)
from whetstone.config.privacy import pseudonym
from whetstone.database.bulk import Pause, among, insert_absent, insert_many, listed, present, update_many
from whetstone.database.bulk_sqlite import utc_of, utc_text
from whetstone.database.engine import read_sqlite, run_sqlite
from whetstone.database.postgres_stats import Statistics
from whetstone.database.types import storable
from whetstone.domain.states import TrajectoryStatus
from whetstone.domain.why_not_trained import OF_COMPLETIONS, WhyNotTrained, name_of
from whetstone.privacy.store import announce_writer, requested_since

c, t = schema.completions.c, schema.trajectories.c
_UNREWARDED = (TrajectoryStatus.OPEN.value, TrajectoryStatus.ENDED.value)
_ACCIDENTS = (WhyNotTrained.ABORTED, WhyNotTrained.ERROR)


# Built once: to build a statement costs as much as to execute it.
@cache
def _lock(dialect: str) -> Select[Any]:
    return (
        select(t.project, t.id, t.completions, t.sampled_tokens, t.tail_completion_id, t.last_seen_at)
        .add_columns(t.state, t.why_not_trained)
        .where(t.project == bindparam("its_project"), among(dialect, t.id))
        # In a fixed order, to avoid deadlocks.
        .order_by(t.id)
        .with_for_update()
    )


_LOCK_SQLITE = (
    "SELECT id, completions, sampled_tokens, tail_completion_id, last_seen_at, state, why_not_trained "
    "FROM trajectories WHERE project = ? AND id IN (SELECT value FROM json_each(?))"
)
"""The same on SQLite, which has one writer at a time: SQLAlchemy takes longer for a row than SQLite does."""


_ANY = "SELECT 1 FROM erasures WHERE asked_at >= ? LIMIT 1"
"""Whether there is any erasure to read: nearly always there is none."""
_Requests = Mapping[tuple[str, str], datetime]
"""Project and name to delete -> when the deletion was requested."""


class _OpenTrajectory(msgspec.Struct):
    """A trajectory with the changes that are about to be written."""

    counted: TrajectoryCounts | TrajectoryRow
    """Its locked row, or its new row."""
    state: str = TrajectoryStatus.OPEN.value
    stored_reason: str | None = None
    """Its `why_not_trained` in SQL."""
    reason: str | None = None
    """The same after the changes."""
    tail: Tail | None = None
    tail_known: bool = False


class CallRows:
    """Writes the rows of calls. Used from one thread, that of the writer."""

    def __init__(self) -> None:
        self.tails = Tails()
        self._statistics = Statistics([schema.trajectories, schema.completions])
        self._pause: Pause | None = None
        self._made = 0
        """Number of rows made."""

    def write(self, connection: Connection, calls: Sequence[Call], *, pauses: bool = False) -> None:
        """Add calls with all their choices, in the caller's transaction. A call that exists already is not changed; a
        call whose deletion was requested before it reached the tables is skipped. `pauses`: pause often for the event
        loop."""
        self._pause = tuning.nap if pauses else None
        if connection.dialect.name == "postgresql":
            self._statistics.begin(connection, len(calls))
        batch: list[NewCompletion] = []
        for call in not_erased(connection, calls):
            retried: Sequence[Any] = ()
            if call.request_digest is not None:
                # The call that it retries may be in the batch, not written yet.
                if any(one.call.request_digest == call.request_digest for one in batch):
                    self._write(connection, batch)
                    batch = []
                if retried := retried_completions(connection, call):
                    self._write(connection, batch)
                    batch = []
                    supersede(connection, call, retried)
            batch += new_completions(call, {row.choice: row.id for row in retried} if retried else {})
        self._write(connection, batch)

    def _write(self, connection: Connection, batch: Sequence[NewCompletion]) -> None:
        if not batch:
            return
        if first := {one.group: one for one in reversed(batch) if one.group_id}:
            # In a fixed order, to avoid deadlocks.
            insert_many(connection, schema.groups, [group_row(first[group]) for group in sorted(first)])
        of_each: defaultdict[Key, list[NewCompletion]] = defaultdict(list)
        for one in batch:
            of_each[one.trajectory].append(one)
        begun = self._begin(connection, of_each)
        gone_on = self._go_on(connection, {key: new for key, new in of_each.items() if key not in begun})
        # Conflict on the id only: a turn number that another writer took must raise an error, not lose a record
        # silently.
        rows = [*chain.from_iterable(begun.values()), *chain.from_iterable(gone_on.values())]
        insert_many(connection, schema.completions, rows, on=("project", "id"), pause=self._pause)
        written = {(row.project, row.id) for row in rows}
        new = [one for one in batch if one.key in written]
        insert_many(connection, schema.answer_ids, [inner_id for one in new for inner_id in answer_ids(one)])
        _continue(connection, new)

    def _begin(
        self, connection: Connection, of_each: Mapping[Key, list[NewCompletion]]
    ) -> dict[Key, list[CompletionRow]]:
        """Insert the missing trajectories with their final counts; return the rows of their completions."""
        unknown = [key for key in of_each if not self.tails.knows(*key)]
        # The id of a new trajectory is unique, so it exists only if its call does: most likely it does not.
        named = [key for key in unknown if of_each[key][0].call.threaded_by != "new"]
        known = _present(connection, schema.trajectories, named)
        completions: dict[Key, list[CompletionRow]] = {}
        trajectories = []
        # In a fixed order, to avoid deadlocks.
        for key in sorted(unknown):
            if key not in known:
                new = of_each[key]
                row = trajectory_row(new[0])
                begun = _OpenTrajectory(row, tail_known=True)
                completions[key] = self._added(connection, new, begun, set())
                row.why_not_trained = begun.reason
                trajectories.append(row)
        inserted = insert_absent(connection, schema.trajectories, trajectories, self._pause)
        for key in [key for key in completions if key not in inserted]:
            # It exists already, or another writer began it meanwhile.
            self.tails.keep(*key, None)
            del completions[key]
        return completions

    def _go_on(
        self, connection: Connection, of_each: Mapping[Key, list[NewCompletion]]
    ) -> dict[Key, list[CompletionRow]]:
        """Lock the existing trajectories and count the calls on them, so that their turns are numbered one after the
        other, even with other writers. Return the rows of their completions."""
        if not of_each:
            return {}
        standings = _locked(connection, of_each)
        if gone := sorted(key for key in of_each if key not in standings):
            # Deleted meanwhile.
            insert_many(connection, schema.trajectories, [trajectory_row(of_each[key][0]) for key in gone])
            standings |= _locked(connection, gone)
        there = _present(connection, schema.completions, (one.key for new in of_each.values() for one in new))
        completions = {key: self._added(connection, new, standings[key], there) for key, new in of_each.items()}
        counted = [one.counted for one in standings.values() if one.counted.last_version is not None]
        update_many(connection, schema.trajectories, counted)
        # Few change, and what watches this column costs each row that names it.
        reasons = [
            {"project": key[0], "id": key[1], "why_not_trained": one.reason}
            for key, one in sorted(standings.items())
            if one.reason != one.stored_reason
        ]
        update_many(connection, schema.trajectories, reasons)
        return completions

    def _added(
        self, connection: Connection, new: Sequence[NewCompletion], to: _OpenTrajectory, there: set[Key]
    ) -> list[CompletionRow]:
        """Return the rows of those completions of a trajectory that do not exist yet, and count them on it."""
        rows: list[CompletionRow] = []
        counted = to.counted
        for one in new:
            if one.key in there:
                continue
            there.add(one.key)
            call, choice = one.call, one.choice
            project, trajectory_id = one.trajectory
            before, tools = counted.tail_completion_id, call.tools
            if not to.tail_known:
                to.tail, to.tail_known = self.tails.of(connection, project, trajectory_id, before), True
            delta = turn_delta(to.tail, one.request, call.prompt_token_ids, tools)
            row = completion_row(one, delta, counted.completions, over=to.state not in _UNREWARDED)
            # A call that broke off after its retry had ended is not the tail. Ids sort by time.
            if call.status == "complete" or before is None or row.id > before:
                counted.tail_completion_id = row.id
                to.tail = tail_of(row.id, delta, choice.token_ids, tools)
                self.tails.keep(project, trajectory_id, to.tail)
            to.reason = _reason(to, one, row)
            counted.completions += 1
            counted.sampled_tokens += row.completion_tokens or 0
            counted.last_version = call.policy_version
            # A slow call that began earlier must not make the trajectory look idle.
            if one.created_at > counted.last_seen_at:
                counted.last_seen_at = one.created_at
            rows.append(row)
            self._made += 1
            if self._pause and self._made % tuning.NAP_EVERY == 0:
                self._pause()
        return rows


def _reason(before: _OpenTrajectory, one: NewCompletion, row: CompletionRow) -> str | None:
    """Return why no step trains on a trajectory, with one more completion in it.

    A reason that all its completions have wins over what the trajectory waits for. The first one counts, unless it came
    by accident.
    """
    is_first = before.counted.completions == 0
    if before.state not in _UNREWARDED or not (is_first or name_of(before.reason or "") in OF_COMPLETIONS):
        return before.reason
    if row.why_not_trained is None:
        return before.reason if is_first else WhyNotTrained.NO_REWARD.value
    if before.reason in _ACCIDENTS or (is_first and one.call.address.trains):
        return row.why_not_trained
    return before.reason


def _continue(connection: Connection, new: Sequence[NewCompletion]) -> None:
    """Note which completions are continued by what was written; the first continuation counts."""
    # Reversed, so that the first one stays; written in a fixed order, to avoid deadlocks.
    firsts = [one.call for one in reversed(new) if one.choice.index == 0]
    by = {(call.project, call.extends): call.id for call in firsts if call.extends and call.status == "complete"}
    rows = [{"project": key[0], "id": key[1], "continued_by": call_id} for key, call_id in sorted(by.items())]
    update_many(connection, schema.completions, rows, only_null="continued_by")


def _locked(connection: Connection, trajectories: Iterable[Key]) -> dict[Key, _OpenTrajectory]:
    dialect = connection.dialect.name
    standings: dict[Key, _OpenTrajectory] = {}
    for project, ids in _by_project(trajectories):
        among_them = listed(dialect, ids)
        if dialect == "sqlite":
            for its_id, count, sampled, tail_id, seen, state, why in read_sqlite(
                connection, _LOCK_SQLITE, (project, among_them)
            ):
                counted = TrajectoryCounts(project, its_id, count, sampled, tail_id, utc_of(seen))
                standings[project, its_id] = _OpenTrajectory(counted, state, why, why)
        else:
            for row in connection.execute(_lock(dialect), {"its_project": project, "ids": among_them}):
                *counts, state, why = row
                standings[row[0], row[1]] = _OpenTrajectory(TrajectoryCounts(*counts), state, why, why)
    return standings


def _present(connection: Connection, table: Table, keys: Iterable[Key]) -> set[Key]:
    """Return those keys that exist in the table."""
    return {key for project, ids in _by_project(keys) for key in present(connection, table, project, ids)}


def _by_project(keys: Iterable[Key]) -> list[tuple[str, list[str]]]:
    """Return the ids of each project, all sorted."""
    ids = defaultdict(set)
    for project, its_id in keys:
        ids[project].add(its_id)
    return [(project, sorted(of_project)) for project, of_project in sorted(ids.items())]


def not_erased(connection: Connection, calls: Sequence[Call]) -> list[Call]:
    """Return the calls without those whose deletion was requested after they arrived."""
    first = min(calls, key=lambda call: call.created_at_s, default=None)
    requests = {} if first is None else _requests_since(connection, first.created_at)
    if not requests:
        return list(calls)
    return [call for call in calls if not _covers(requests, call.project, _names(call), call.created_at)]


def erased_feedback(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the ids of feedback on trajectories whose deletion was requested after the feedback arrived."""
    requests = _requests_since(connection, min(row["created_at"] for row in rows)) if rows else {}
    return {
        row["id"]
        for row in rows
        if row["target_kind"] == "trajectory"
        and _covers(requests, row["project"], [row["target_id"]], row["created_at"])
    }


def _names(call: Call) -> list[str]:
    user: str | None = storable(call.end_user)
    return [call.trajectory_id] if user is None else [call.trajectory_id, user, pseudonym(user)]


def _requests_since(connection: Connection, first_came_at: datetime) -> _Requests:
    """Return the deletions requested since the first record arrived. A deletion waits for this transaction."""
    if connection.dialect.name == "sqlite" and not run_sqlite(connection, _ANY, (utc_text(first_came_at),)).fetchone():
        return {}
    announce_writer(connection)
    return requested_since(connection, first_came_at)


def _covers(requests: _Requests, project: str, names: Iterable[str], came_at: datetime) -> bool:
    return any(at is not None and at >= came_at for at in (requests.get((project, name)) for name in names))
