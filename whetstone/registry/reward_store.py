"""SQL of the prompts and rewards by which versions of a policy are compared. Reads only."""

from datetime import UTC, datetime

from sqlalchemy import Connection, column, func, select, table, text

from migrations import schema

MOST_PROMPTS = 2_000
"""Most attempts, of all policies, among which a version's first prompts in training are looked for."""

HOUR = "%Y-%m-%d %H:%M"
"""Format of hours in the roll-ups, in UTC."""

t = schema.trajectories.c
h = table("admin_trajectory_hours", *map(column, ("project", "policy", "version", "split", "hour", "trajectories"))).c
# The same rewards as in the roll-ups. The split is written out: a partial index is not used for a parameter.
_HELD_OUT = text("""
    SELECT prompt_hash, reward FROM trajectories
    WHERE project = :project AND policy = :policy AND split = 'eval' AND first_version = :version
        AND prompt_hash IS NOT NULL AND reward BETWEEN -1e6 AND 1e6
    ORDER BY prompt_hash, created_at
""")


def held_out_rewards(connection: Connection, project: str, policy: str, version: int) -> dict[str, list[float]]:
    """Return the held-out rewards of a version by the hash of the prompt, in the order of the attempts."""
    by_prompt: dict[str, list[float]] = {}
    values = {"project": project, "policy": policy, "version": version}
    for prompt_hash, reward in connection.execute(_HELD_OUT, values):
        by_prompt.setdefault(prompt_hash, []).append(reward)
    return by_prompt


def training_prompts(connection: Connection, project: str, policy: str, version: int) -> list[str]:
    """Return the hashes of a version's first prompts in training, one for each rewarded attempt.

    MOST_PROMPTS rows are read, by the time at which they began, whatever the size of the table.
    """
    of_version = (h.project == project, h.policy == policy, h.version == version, h.split == "train")
    began = connection.execute(select(func.min(h.hour)).where(*of_version, h.trajectories > 0)).scalar()
    if began is None:
        return []
    first = (
        select(t.policy, t.split, t.first_version, t.prompt_hash, t.reward)
        .where(t.project == project, t.created_at >= datetime.strptime(began, HOUR).replace(tzinfo=UTC))
        .order_by(t.created_at)
        .limit(MOST_PROMPTS)
        .subquery()
        .c
    )
    query = select(first.prompt_hash).where(
        first.policy == policy,
        first.split == "train",
        first.first_version == version,
        first.prompt_hash.is_not(None),
        first.reward.is_not(None),
    )
    return list(connection.execute(query).scalars())
