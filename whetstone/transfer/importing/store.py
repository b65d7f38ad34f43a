"""SQL of imports: write conversations of a log as trajectories and completions, as the proxy stores a turn.

Their token ids are unknown: `why_not_trained` is `imported`, their trajectories are excluded, their groups discarded,
and their policy is never served. So no policy-gradient step, baseline or gate ever reads them; supervised steps and
exports do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, case, func, literal, select

from migrations import schema
from whetstone.config.privacy import pseudonym
from whetstone.database.engine import chunks, insert_all_new, insert_new
from whetstone.domain.ids import IMPORTED_LOG, version_id
from whetstone.errors import WhetstoneError
from whetstone.privacy.store import announce_writer, requested_since
from whetstone.transfer.importing.rows import (
    IMPORTED,
    Chunk,
    ConversationHashes,
    Histories,
    KeyedEntry,
    PendingTrajectory,
    digest,
    figures,
    place,
)

c, g, p, t = schema.completions.c, schema.groups.c, schema.policies.c, schema.trajectories.c

NEXT_TO_NOTHING = 1e-150
"""A smaller reward has a square that underflows to 0."""


class NotImportable(WhetstoneError):
    """The policy cannot take a log; the message says what to do."""


def prepare(connection: Connection, project: str, policy: str, now: datetime) -> None:
    """Create the policy that the log is stored under, if it does not exist.

    Raises:
        NotImportable: the policy is served by vLLM, or belongs to another server.
    """
    insert_new(connection, schema.projects, {"id": project, "created_at": now})
    insert_new(
        connection,
        schema.policies,
        {
            "project": project, "id": policy, "base_model": policy, "model_path": policy, "live_version": 0,
            "next_version": 1, "next_step": 1, "state": "recording", "created_at": now, "upstream": IMPORTED_LOG,
        },
    )  # fmt: skip
    insert_new(
        connection,
        schema.policy_versions,
        {
            "project": project, "id": version_id(policy, 0), "policy": policy, "version": 0, "state": "live",
            "served": False, "created_at": now, "promoted_at": now,
        },
    )  # fmt: skip
    upstream = connection.execute(select(p.upstream).where(p.project == project, p.id == policy)).scalar_one()
    if upstream != IMPORTED_LOG:
        raise NotImportable(
            f"the policy {policy!r} answers apps: imported answers would be counted as its own. Name another with "
            f"--policy; `whetstone step {policy} --imitate NAME` learns from it"
        )


def write(
    connection: Connection,
    project: str,
    policy: str,
    some: Sequence[KeyedEntry],
    now: datetime,
    gone: set[bytes],
    histories: Histories,
) -> Counter[str]:
    """Add some conversations, in one transaction of the caller. Return how many trajectories and completions were
    written, and how many conversations were there already, were deleted on request, or belong to an app's trajectory
    (`taken`).

    `gone`: the histories of this import's deleted conversations; their continuations are left out too, and added to it.
    """
    chunk = Chunk(project, policy, now)
    remaining = _not_erased(connection, chunk, [(one, histories.of(one.entry)) for one in some], gone)
    _look(connection, chunk, remaining)
    for one, hashes in remaining:
        place(chunk, one, hashes)
    every = chunk.trajectories.values()
    begun = [pending.row | figures(pending) for pending in every if pending.row is not None]
    _apart(connection, chunk, begun)
    group_ids = _write_groups(connection, chunk, begun)
    if begun:
        insert_all_new(connection, schema.trajectories, begun)
    if chunk.rows:
        insert_all_new(connection, schema.completions, list(chunk.rows.values()), on=["project", "id"])
    for trajectory_id, pending in sorted(chunk.trajectories.items()):
        if pending.changed and pending.row is None:
            _update(connection, chunk, trajectory_id, pending)
    if chunk.continued:
        connection.execute(
            schema.completions.update()
            .where(c.project == project, c.id == bindparam("its_id"), c.continued_by.is_(None))
            .values(continued_by=bindparam("by")),
            [{"its_id": one, "by": by} for one, by in sorted(chunk.continued.items())],
        )
    _count_groups(connection, project, group_ids)
    return chunk.counted + Counter(trajectories=len(begun), completions=len(chunk.rows))


def _look(connection: Connection, chunk: Chunk, keyed_hashes: Iterable[tuple[KeyedEntry, ConversationHashes]]) -> None:
    """Read the existing trajectories, completions and histories that these conversations refer to."""
    named, wanted = set[str](), set[bytes]()
    for one, hashes in keyed_hashes:
        entry, name = one.entry, one.entry.tags.trajectory_id
        suffix = f".{entry.choice}" if entry.choice else ""
        named |= {f"imported-{one.key}{suffix}", *((f"{name}{suffix}",) if name else ())}
        if entry.is_call:
            before = hashes.turns[: entry.answers[0]]
            wanted |= {one for turn in before for one in (turn.history, turn.tool_history) if one is not None}
    columns = select(c.id, c.trajectory_id, c.history, c.tool_history, c.continued_by, c.created_at).where(
        c.project == chunk.project, c.policy == chunk.policy
    )
    queries = [columns.where(kind.in_(some)) for some in chunks(wanted) for kind in (c.history, c.tool_history)]
    heads = [row for query in queries for row in connection.execute(query)]
    named |= {row.trajectory_id for row in heads}
    for some in chunks(named):
        there = connection.execute(
            select(t.id, t.completions, t.sampled_tokens, t.tail_completion_id, t.why_not_trained).where(
                t.project == chunk.project, t.id.in_(some)
            )
        )
        for its_id, completions, tokens, tail, why in there:
            chunk.trajectories[its_id] = PendingTrajectory(completions, tokens, tail, ours=why == IMPORTED)
        heads += connection.execute(columns.where(c.trajectory_id.in_(some)))
        chunk.completions.update(connection.scalars(select(c.id).where(c.project == chunk.project, c.id.in_(some))))
    for row in sorted({row.id: row for row in heads}.values(), key=lambda row: (row.created_at, row.id)):
        chunk.completions.add(row.id)
        for history in (row.history, row.tool_history):
            if history is not None:
                chunk.heads.setdefault(history, []).append((row.id, row.trajectory_id))
    chunk.taken.update(row.id for row in heads if row.continued_by is not None)


def _not_erased(
    connection: Connection, chunk: Chunk, some: Sequence[tuple[KeyedEntry, ConversationHashes]], gone: set[bytes]
) -> list[tuple[KeyedEntry, ConversationHashes]]:
    """Return the conversations that no deletion request covers. Continuations of a covered one are left out too: each
    later call of a conversation repeats its text."""
    announce_writer(connection)
    erased_at = requested_since(connection, min(one.entry.tags.created_at or chunk.now for one, _ in some))
    remaining = []
    for one, hashes in some:
        tags = one.entry.tags
        user = (tags.end_user, pseudonym(tags.end_user)) if tags.end_user is not None else ()
        ids = [name for name in (tags.trajectory_id, f"imported-{one.key}") if name is not None]
        siblings = [f"{name}.{one.entry.choice}" for name in ids if one.entry.choice]
        named = ((chunk.project, name) for name in (*ids, *siblings, *user))
        at = [erased_at[name] for name in named if name in erased_at]
        before = (turn.history for turn in hashes.turns[: one.entry.answers[0]] if turn.history is not None)
        goes_on = one.entry.is_call and not gone.isdisjoint(before)
        if goes_on or any(when >= (tags.created_at or chunk.now) for when in at):
            answered = (hashes.turns[place].history for place in one.entry.answers)
            gone.update(history for history in answered if history is not None)
            chunk.counted["erased"] += 1
        else:
            remaining.append((one, hashes))
    return remaining


def _update(connection: Connection, chunk: Chunk, trajectory_id: str, pending: PendingTrajectory) -> None:
    """Update an existing trajectory."""
    values = figures(pending)
    if (seen_at := pending.last_seen_at) is not None:
        later = case((t.last_seen_at < seen_at, literal(seen_at, t.last_seen_at.type)), else_=t.last_seen_at)
        values |= {"last_seen_at": later, "ended_at": later}
    connection.execute(
        schema.trajectories.update().where(t.project == chunk.project, t.id == trajectory_id).values(values)
    )


def _apart(connection: Connection, chunk: Chunk, begun: Sequence[dict[str, Any]]) -> None:
    """Give imported trajectories another group if theirs is an app's: it would close with them, and be ranked."""
    apps = select(g.id).where(g.project == chunk.project, g.reason.is_distinct_from(IMPORTED))
    its_groups = chunks({row["group_id"] for row in begun if row["group_id"] is not None})
    taken = {group_id for some in its_groups for group_id in connection.scalars(apps.where(g.id.in_(some)))}
    for row in begun:
        if row["group_id"] in taken:
            row["group_id"] = f"imported-{digest(chunk.policy, row['group_id'])}"


def _write_groups(connection: Connection, chunk: Chunk, begun: Sequence[Mapping[str, Any]]) -> list[str]:
    """Create the groups of imported trajectories, as discarded. Return the ids of all groups to count."""
    made = {
        row["group_id"]: {
            "project": chunk.project,
            "id": row["group_id"],
            "policy": chunk.policy,
            "formed_by": "choices" if row["group_id"].endswith(".choices") else "header",
            "state": "discarded",
            "reason": IMPORTED,
            "size": 0,
            "rewarded": 0,
            "created_at": row["created_at"],
            "closed_at": chunk.now,
        }
        # Reversed, so that a group begins with its first trajectory.
        for row in reversed(begun)
        if row["group_id"] is not None
    }
    if made:
        insert_all_new(connection, schema.groups, [made[group_id] for group_id in sorted(made)])
    changed = [trajectory_id for trajectory_id, standing in chunk.trajectories.items() if standing.changed]
    groups = select(t.group_id).where(t.project == chunk.project, t.group_id.is_not(None))
    there = {str(one) for ids in chunks(changed) for one in connection.scalars(groups.where(t.id.in_(ids)))}
    return sorted({*made, *there})


def _count_groups(connection: Connection, project: str, group_ids: Sequence[str]) -> None:
    """Update the figures of imported groups."""
    for some in chunks(group_ids):
        # PostgreSQL raises an error when a product underflows to 0.
        near = case((func.abs(t.reward) < NEXT_TO_NOTHING, 0.0), else_=t.reward)
        query = (
            select(t.group_id, func.count(), func.count(t.reward), func.avg(t.reward), func.avg(near * near))
            .where(t.project == project, t.group_id.in_(some))
            .group_by(t.group_id)
        )
        for group_id, size, rewarded, mean, squares in connection.execute(query).all():
            spread = None if mean is None else max(0.0, squares - mean * mean) ** 0.5
            connection.execute(
                schema.groups.update()
                .where(g.project == project, g.id == group_id, g.reason == IMPORTED)
                .values(size=size, rewarded=rewarded, reward_mean=mean, reward_spread=spread)
            )
