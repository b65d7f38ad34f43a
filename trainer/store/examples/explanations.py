"""Select and read from SQL what judges wrote about attempts. Reads only.

An explanation is about the whole attempt; it corrects the policy's last answer in it.
"""

from collections.abc import Collection

from sqlalchemy import Connection, Subquery, and_, column, func, select, table

from migrations import schema
from trainer.domain.claims import Claim
from trainer.store.examples.sources import STANDING, not_superseded
from whetstone.database.engine import chunks
from whetstone.database.types import Utc
from whetstone.domain.ids import BY_JUDGE

c, f, t = schema.completions.c, schema.feedback.c, schema.trajectories.c
_names = ("project", "judgement_id", "group_id", "trajectory_id", "purpose", "explanation")
_view = table("admin_judgements", *map(column, _names), column("created_at", Utc), column("accepted_at", Utc))
j = _view.c


def explained_answers(claim: Claim) -> Subquery:
    """Select explanations of scores that made rewards, with the answer that each is about; the newest has place 1.

    The request to the judge must stand, and the answer be older than the judgement: else it was about other answers.
    """
    other = schema.completions.alias()
    last = (
        select(func.max(other.c.turn))
        .where(other.c.project == t.project, other.c.trajectory_id == t.id, other.c.policy == claim.policy)
        .where(not_superseded(other.c.why_not_trained))
        .correlate(schema.trajectories)
        .scalar_subquery()
    )
    requested = (
        select(f.id)
        .where(f.project == j.project, f.target_kind == "group", f.target_id == j.group_id, f.source == "judge")
        .where(f.state.in_(STANDING), f.withdrawn_at.is_(None))
        .correlate(_view)
        .exists()
    )
    place = func.row_number().over(partition_by=c.id, order_by=(j.accepted_at.desc(), j.judgement_id))
    return (
        select((c.id + BY_JUDGE + j.judgement_id).label("id"), c.trajectory_id, c.id.label("completion_id"))
        .add_columns(j.accepted_at.label("created_at"), place.label("place"))
        .select_from(_view)
        .join(schema.trajectories, and_(t.project == j.project, t.id == j.trajectory_id))
        .join(schema.completions, and_(c.project == t.project, c.trajectory_id == t.id, c.turn == last))
        .where(j.project == claim.project, j.purpose == "reward", func.trim(j.explanation) != "", requested)
        .where(c.created_at <= j.created_at, t.split == "train", t.no_train.is_(False))
        .subquery()
    )


def read_explanations(connection: Connection, project: str, source_ids: Collection[str]) -> dict[str, str]:
    """Return the explanations by the ids of their examples; those that were deleted meanwhile are absent."""
    of_attempt = and_(c.project == j.project, c.trajectory_id == j.trajectory_id)
    query = (
        select((c.id + BY_JUDGE + j.judgement_id).label("source_id"), j.explanation)
        .join_from(_view, schema.completions, of_attempt)
        .where(j.project == project, func.trim(j.explanation) != "")
    )
    words: dict[str, str] = {}
    for some in chunks({source_id.rpartition("/")[2] for source_id in source_ids}):
        for row in connection.execute(query.where(j.judgement_id.in_(some))):
            if row.source_id in source_ids:
                words[row.source_id] = row.explanation
    return words
