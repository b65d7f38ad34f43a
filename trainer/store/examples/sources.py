"""Select from SQL the answers that are worth imitating next. Reads only.

Excluded are: answers that the app keeps from training, answers whose text was changed (`redacted`), and answers that
could not be rendered before.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Subquery, and_, case, func, or_, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ExampleSelection, WhyLeftOut
from whetstone.config.trainer import BEST, DEMONSTRATIONS
from whetstone.database.engine import chunks
from whetstone.domain.why_not_trained import WhyNotTrained

STANDING = ("applied", "used", "unused")
"""States of feedback whose target exists and that no later feedback replaces."""

c, e, f, t = schema.completions.c, schema.examples.c, schema.feedback.c, schema.trajectories.c

USABLE = or_(e.left_out.is_(None), e.left_out.in_((WhyLeftOut.TOO_LONG.value, WhyLeftOut.NO_PAIR.value)))
"""True for usable examples, and for sources without an example yet."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of an example."""

    source_id: str
    trajectory_id: str
    completion_id: str


def whole_answers(claim: Claim, versions: Collection[int]) -> tuple[ColumnElement[bool], ...]:
    """Conditions on completions: complete answers that one of `versions` of the policy sampled, with their ids."""
    sampled = (c.project == claim.project, c.policy == claim.policy, c.policy_version.in_(versions))
    return (*sampled, c.status == "complete", c.why_not_trained.is_(None), c.token_ids.is_not(None))


def own_answers(claim: Claim, versions: Collection[int], suffix: str) -> Select[Any]:
    """Select the policy's `whole_answers` that may be trained on, as a `Source`: first those without an example of this
    suffix, then those used longest ago, the newest first.

    `suffix`: what follows the completion's id in the id of such an example.
    """
    source_id = c.id + suffix
    known = and_(e.project == claim.project, e.policy == claim.policy, e.source_id == source_id)
    return (
        select(source_id, c.trajectory_id, c.id)
        .join(schema.trajectories, and_(t.project == c.project, t.id == c.trajectory_id))
        .join(schema.examples, known, isouter=True)
        .where(*whole_answers(claim, versions), t.split == "train", t.no_train.is_(False), USABLE)
        .order_by(func.coalesce(e.step, 0), c.created_at.desc(), c.id)
    )


def find(connection: Connection, claim: Claim, wanted: ExampleSelection, *, past: bool = False) -> list[Source]:
    """Return what the step imitates: first what no step has imitated yet, then the highest reward, then the newest.

    `past`: only trajectories that no step on rewards will take any more.
    """
    if wanted.source == DEMONSTRATIONS:
        rows = connection.execute(_demonstrations(claim).limit(wanted.limit))
        return [Source(*row) for row in rows]
    best_first = _trajectories(claim, wanted)
    if past:
        best_first = best_first.where(t.state.in_(("trained", "excluded")))
    chosen: list[str] = list(connection.execute(best_first.limit(wanted.limit)).scalars())
    return answers_of(connection, claim, claim.policy if wanted.source == BEST else wanted.source, chosen)


def answers_of(
    connection: Connection, claim: Claim, policy: str, trajectory_ids: Sequence[str], suffix: str = ""
) -> list[Source]:
    """Return a policy's complete answers in these trajectories.

    `suffix`: what follows the completion's id in the id of a source.
    """
    query = select(c.id + suffix, c.trajectory_id, c.id).where(c.project == claim.project, c.policy == policy)
    allowed = (not_superseded(c.why_not_trained), _NOT_REDACTED)
    query = query.where(c.status == "complete", *allowed).order_by(c.trajectory_id, c.turn)
    return [
        Source(*row)
        for some in chunks(trajectory_ids)
        for row in connection.execute(query.where(c.trajectory_id.in_(some)))
    ]


_NOT_REDACTED = c.why_not_trained.is_distinct_from(WhyNotTrained.REDACTED.value)


def not_superseded(why: ColumnElement[Any]) -> ColumnElement[bool]:
    """Condition on the reason of a completion or trajectory: no retry took its place."""
    return why.is_distinct_from(WhyNotTrained.SUPERSEDED.value)


def _demonstrations(claim: Claim) -> Any:
    """Select feedback, trajectory and completion of valid demonstrations: the newest of each completion."""
    shown = about_answers(claim, f.demonstration)
    known = and_(e.project == claim.project, e.policy == claim.policy, e.source_id == shown.c.id)
    return (
        select(shown.c.id, shown.c.trajectory_id, shown.c.completion_id)
        .join(schema.completions, and_(c.project == claim.project, c.id == shown.c.completion_id))
        .join(schema.examples, known, isouter=True)
        .where(shown.c.place == 1, c.policy == claim.policy, _NOT_REDACTED, USABLE)
        .order_by(func.coalesce(e.step, 0), shown.c.created_at.desc(), shown.c.id)
    )


def about_answers(claim: Claim, words: ColumnElement[Any]) -> Subquery:
    """Select valid feedback that has `words`, with the answer that it is about; the newest of an answer has place 1."""
    answered = func.coalesce(f.completion_id, t.tail_completion_id)
    place = func.row_number().over(partition_by=answered, order_by=(f.created_at.desc(), f.id.desc()))
    return (
        select(f.id, f.trajectory_id, answered.label("completion_id"), f.created_at, place.label("place"))
        .join(schema.trajectories, and_(t.project == f.project, t.id == f.trajectory_id))
        .where(f.project == claim.project, words.is_not(None))
        .where(f.state.in_(STANDING), f.withdrawn_at.is_(None), t.split == "train", t.no_train.is_(False))
        .subquery()
    )


def _trajectories(claim: Claim, wanted: ExampleSelection) -> Any:
    """Select ids of trajectories worth imitating, the best first."""
    best = wanted.source == BEST
    usable = func.count(case((USABLE, 1)))
    known = (
        select(e.trajectory_id, func.max(e.step).label("step"), usable.label("usable"))
        .where(e.project == claim.project, e.policy == claim.policy, e.source == wanted.source)
        .group_by(e.trajectory_id)
        .subquery()
    )
    query = select(t.id).join(known, known.c.trajectory_id == t.id, isouter=True)
    query = query.where(
        func.coalesce(known.c.usable, 1) > 0, *trainable_of(claim, claim.policy if best else wanted.source)
    )
    if wanted.min_reward is not None:
        query = query.where(t.reward >= wanted.min_reward)
    elif best:
        query = query.where(t.id.in_(_winners(claim)))
    return query.order_by(func.coalesce(known.c.step, 0), t.reward.desc().nulls_last(), t.created_at.desc(), t.id)


def _winners(claim: Claim) -> Any:
    """Select from each group the attempt with the highest reward, of equals the newest.

    Only where it beats another attempt: else it would be imitated although it failed like all others.
    """
    place = func.row_number().over(partition_by=t.group_id, order_by=(t.reward.desc(), t.created_at.desc(), t.id))
    lowest = func.min(t.reward).over(partition_by=t.group_id)
    rewarded = (*trainable_of(claim, claim.policy), t.group_id.is_not(None), t.reward.is_not(None))
    ranked = select(t.id, t.reward, place.label("place"), lowest.label("lowest")).where(*rewarded).subquery()
    return select(ranked.c.id).where(ranked.c.place == 1, ranked.c.reward > ranked.c.lowest)


def trainable_of(claim: Claim, policy: str) -> tuple[ColumnElement[bool], ...]:
    """Conditions on trajectories: they belong to the policy and may be trained on."""
    allowed = (t.split == "train", t.no_train.is_(False), not_superseded(t.why_not_trained))
    return (t.project == claim.project, t.policy == policy, *allowed)
