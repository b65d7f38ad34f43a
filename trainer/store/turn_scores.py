"""Read from SQL how judges scored single answers of attempts, where the policy has them do so. Reads only."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Text, and_, cast, or_, select

from migrations import schema
from trainer.domain.advantages import turn_credit
from trainer.store.examples.sources import not_superseded
from whetstone.database.engine import chunks

c, j, t = schema.completions.c, schema.judgements.c, schema.trajectories.c


def read_turn_credit(
    connection: Connection, project: str, trajectory_ids: Collection[str]
) -> dict[str, dict[int, float]]:
    """Return what was earned at each turn of trajectories whose reward judges gave, by trajectory; see `turn_credit`.

    Of a group that was ranked again, the judgements of the last ranking count. Trajectories whose answers are no longer
    those that were scored are absent.
    """
    credit: dict[str, dict[int, float]] = {}
    for some in chunks(trajectory_ids):
        scored = _scored(connection, project, some)
        for trajectory_id, turns in _answers(connection, project, scored).items():
            judged = [scores for scores in scored[trajectory_id] if len(scores) == len(turns)]
            if judged and turns:
                credit[trajectory_id] = dict(zip(turns, turn_credit(judged), strict=True))
    return credit


def _scored(connection: Connection, project: str, trajectory_ids: Sequence[str]) -> Mapping[str, list[list[float]]]:
    """Return the scores of each judgement by trajectory."""
    query = (
        select(t.id, j.attempts_hash, j.scores)
        .join(schema.judgements, and_(j.project == t.project, j.group_id == t.group_id))
        .where(t.project == project, t.id.in_(trajectory_ids), t.reward_source == "judge")
        .where(j.state == "accepted", j.purpose == "reward", cast(j.scores, Text).like('%"turns"%'))
        .order_by(j.accepted_at.desc(), j.id)
    )
    last: dict[str, str] = {}
    scored: defaultdict[str, list[list[float]]] = defaultdict(list)
    for trajectory_id, attempts_hash, scores in connection.execute(query):
        entry: Any = scores.get(trajectory_id)
        if last.setdefault(trajectory_id, attempts_hash) == attempts_hash and entry is not None:
            scored[trajectory_id].append(entry["turns"])
    return scored


def _answers(connection: Connection, project: str, trajectory_ids: Collection[str]) -> dict[str, list[int]]:
    """Return the turns of the answers that a judge reads, by trajectory."""
    answered = or_(c.response.is_not(None), c.response_text.is_not(None))
    query = (
        select(c.trajectory_id, c.turn)
        .where(c.project == project, not_superseded(c.why_not_trained), answered)
        .order_by(c.trajectory_id, c.turn)
    )
    turns: defaultdict[str, list[int]] = defaultdict(list)
    for some in chunks(trajectory_ids):
        for trajectory_id, turn in connection.execute(query.where(c.trajectory_id.in_(some))):
            turns[trajectory_id].append(turn)
    return turns
