"""Define the current roll-up tables: hourly counts for dashboards, and the changes that are not in them yet.

For each of `trajectories`, `completions` and `feedback` there are two tables with the same columns. Triggers write
`*_changes`, in the transaction of the change: one row with a row's previous contribution (negative) and one with its
new contribution. The judging worker adds them to `*_hours`. Read the views `admin_*_hours`, which combine both, and
sum.
"""

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, Table, Text

NUMBER = BigInteger().with_variant(Integer, "sqlite")
FRACTIONS = ("reward_sum", "reward_squares", "ttft_ms", "total_ms")
"""Measures that are not whole numbers."""
TOKENS = ("prompt_tokens", "sampled_tokens")
"""Measures that may exceed 32 bits in an hour."""

TRAJECTORY_KEYS = {
    "policy": "policy of the trajectory's first completion",
    "hour": "UTC, YYYY-MM-DD HH:00, in which it began",
    "version": "the version that spoke first; -1 where none did",
    "split": "train | eval",
    "state": "the trajectory's, as it is now",
    "why_not_trained": "likewise, without the name behind a reason; empty where it has none",
}
TRAJECTORY_MEASURES = {
    "trajectories": "how many",
    "ended": "those that are over",
    "grouped": "those that belong to a group",
    "rewarded": "those with a reward from -1e6 to 1e6",
    "off_scale": "those with a reward beyond, which is in no sum",
    "reward_sum": "of the rewards",
    "reward_squares": "sum of the rewards' squares",
}
COMPLETION_KEYS = {
    "hour": "UTC, YYYY-MM-DD HH:00, in which the request arrived",
    "policy": "the policy that spoke",
    "version": "the version that spoke",
    "key_id": "the API key that asked; empty without keys",
    "status": "complete | aborted | error",
}
COMPLETION_MEASURES = {
    "completions": "how many",
    "prompt_tokens": "sum over whole prompts",
    "sampled_tokens": "sum",
    "ttft_count": "those that were streamed to a first event",
    "ttft_ms": "sum of their milliseconds from request to first event",
    "total_count": "those whose last byte was sent",
    "total_ms": "sum of their milliseconds from request to last byte",
}
FEEDBACK_KEYS = {
    "hour": "UTC, YYYY-MM-DD HH:00, in which it came",
    "source": "reward | thumbs | parts | demonstration | judge | end | close",
    "state": "the feedback's, as it is now",
}
FEEDBACK_MEASURES = {
    "feedback": "how many",
    "rewarded": "those with a reward from -1e6 to 1e6",
    "reward_sum": "of the rewards",
}


def of_trajectories(metadata: MetaData) -> tuple[Table, Table]:
    """Return the tables of hours and of changes for trajectories."""
    by_version = Index(None, "project", "policy", "version")
    return _both(metadata, "trajectory", "trajectories", TRAJECTORY_KEYS, TRAJECTORY_MEASURES, by_version)


def of_completions(metadata: MetaData) -> tuple[Table, Table]:
    """Return the tables of hours and of changes for completions."""
    return _both(metadata, "completion", "completions", COMPLETION_KEYS, COMPLETION_MEASURES)


def of_feedback(metadata: MetaData) -> tuple[Table, Table]:
    """Return the tables of hours and of changes for feedback."""
    return _both(metadata, "feedback", "feedback", FEEDBACK_KEYS, FEEDBACK_MEASURES)


def _both(
    metadata: MetaData, kind: str, what: str, keys: dict[str, str], measures: dict[str, str], *indexes: Index
) -> tuple[Table, Table]:
    hours = Table(
        f"{kind}_hours",
        metadata,
        Column("project", Text, primary_key=True, comment="J: the tenant"),
        *(Column(name, _type(name), primary_key=True, comment=f"J: {meaning}") for name, meaning in keys.items()),
        *_measures("J", measures),
        *indexes,
        comment=f"{what} by the hour, for dashboards",
    )
    every = "P, J, T, W"
    changes = Table(
        f"{kind}_changes",
        metadata,
        # Without the project: on SQLite an integer alone is the row's own id, and needs no separate index.
        Column("id", NUMBER, primary_key=True, autoincrement=False, comment=f"{every}: later than all before it"),
        Column("project", Text, nullable=False, comment=f"{every}: the tenant"),
        *(Column(name, _type(name), nullable=False, comment=f"{every}: {meaning}") for name, meaning in keys.items()),
        *_measures(every, measures),
        comment=f"what changed of {what} and is not in {kind}_hours yet; triggers write it",
    )
    return hours, changes


def _type(key: str) -> type[Integer] | type[Text]:
    return Integer if key == "version" else Text


def _measured(name: str) -> type[BigInteger] | type[Float[float]] | type[Integer]:
    if name in FRACTIONS:
        return Float
    return BigInteger if name in TOKENS else Integer


def _measures(writer: str, measures: dict[str, str]) -> list[Column[float]]:
    return [
        Column(name, _measured(name), nullable=False, comment=f"{writer}: {meaning}")
        for name, meaning in measures.items()
    ]
