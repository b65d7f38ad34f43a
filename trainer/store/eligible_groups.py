"""Read from SQL what a step may take: scored groups, the lineage. Writes nothing."""

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, and_, func, select

from migrations import schema
from trainer.domain.eligible_groups import Candidate, Standing
from trainer.store.step_ends import UNFINISHED
from whetstone.domain.lineage import lineage

_g, _t = schema.groups.c, schema.trajectories.c


def lock_candidates(connection: Connection, project: str, policy: str, closed_before: datetime | None = None) -> None:
    """Lock the scored groups until the transaction ends; with `closed_before` only those.

    A transaction that revises a reward or adds a member locks the group first, in the order of ids as here. So what is
    read after this stays true until it is claimed.
    """
    scored = select(_g.id).where(*_scored(project, policy, closed_before)).order_by(_g.id)
    connection.execute(scored.with_for_update(key_share=True))


def read_candidates(
    connection: Connection, project: str, policy: str, closed_before: datetime | None = None
) -> list[Candidate]:
    """Return the scored groups with their rewarded members, the oldest first; with `closed_before` only those."""
    query = (
        select(
            _g.id, _g.closed_at, _g.compared_with, _t.id, _t.reward, _t.first_version, _t.last_version,
            _t.sampled_tokens,
        )
        .add_columns(func.coalesce(_t.task, ""), func.coalesce(_t.end_user, ""), func.coalesce(_t.prompt_hash, ""))
        .join(schema.trajectories, and_(_t.project == _g.project, _t.group_id == _g.id))
        .where(*_scored(project, policy, closed_before))
        .where(_t.state == "rewarded", _t.split == "train", _t.no_train.is_(False), _t.reward.is_not(None))
        .order_by(_g.closed_at, _g.id, _t.id)
    )  # fmt: skip
    return Candidate.grouped(tuple(row) for row in connection.execute(query))


def read_lineage(connection: Connection, project: str, policy: str, live: int) -> list[int]:
    """Return the live version, its parent, and so on to the base model."""
    v = schema.policy_versions.c
    query = select(v.version, v.parent).where(v.project == project, v.policy == policy)
    return lineage(live, {row.version: row.parent for row in connection.execute(query)})


def read_live_since(connection: Connection, project: str, policy: str, live: int) -> datetime | None:
    """Return when the live version was last promoted; None if that is not recorded."""
    v = schema.policy_versions.c
    query = select(v.promoted_at).where(v.project == project, v.policy == policy, v.version == live)
    since: datetime | None = connection.execute(query).scalar_one_or_none()
    return since


def read_standing(connection: Connection, project: str, policy: str) -> Standing | None:
    """Return the state of the policy; None where there is none of that name."""
    p = schema.policies.c
    row = connection.execute(select(schema.policies).where(p.project == project, p.id == policy)).one_or_none()
    if row is None:
        return None
    unfinished = unfinished_step(connection, project, policy)
    return Standing(row.state, row.live_version, None if unfinished is None else unfinished.number)


def policy_names(connection: Connection, project: str) -> list[str]:
    """Return the project's policies."""
    p = schema.policies.c
    return list(connection.execute(select(p.id).where(p.project == project).order_by(p.id)).scalars())


def unfinished_step(connection: Connection, project: str, policy: str, *, lock: bool = False) -> Any:
    """Return the row of the policy's unfinished step; None without one. `lock`: lock it until the transaction ends."""
    s = schema.steps.c
    under_way = (s.project == project, s.policy == policy, s.ended_at.is_(None), s.state.in_(UNFINISHED))
    query = select(schema.steps).where(*under_way)
    return connection.execute(query.with_for_update(key_share=True) if lock else query).one_or_none()


def _scored(project: str, policy: str, closed_before: datetime | None) -> tuple[Any, ...]:
    scored = (_g.project == project, _g.policy == policy, _g.state == "scored")
    return scored if closed_before is None else (*scored, _g.closed_at < closed_before)
