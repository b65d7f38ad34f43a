"""Define the current roll-up tables: hourly counts for dashboards, and the changes that are not in them yet.

For each of `trajectories`, `completions` and `feedback` there are two tables with the same columns. Triggers write
`*_changes`, in the transaction of the change: one row with a row's previous contribution (negative) and one with its
new contribution. The judging worker adds them to `*_hours`. Read the views `admin_*_hours`, which combine both, and
sum.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

NUMBER = BigInteger().with_variant(Integer, "sqlite")
TYPES: dict[str, type[TypeEngine[Any]]] = {
    "version": Integer,
    # Tokens may exceed 32 bits in an hour.
    **dict.fromkeys(("prompt_tokens", "sampled_tokens"), BigInteger),
    **dict.fromkeys(("reward_sum", "reward_squares", "ttft_ms", "total_ms"), Float),
}
"""Types of the columns that differ: other keys are texts, other measures whole numbers."""

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


def hours_and_changes(
    metadata: MetaData, kind: str, what: str, keys: dict[str, str], measures: dict[str, str], *indexes: Index
) -> tuple[Table, Table]:
    """Return the tables of hours and of changes of one kind of row."""
    writers = "P, J, T, W"
    hours = Table(
        f"{kind}_hours",
        metadata,
        Column("project", Text, primary_key=True, comment="J: the tenant"),
        *_columns("J", keys, Text, primary_key=True),
        *_columns("J", measures, Integer),
        *indexes,
        comment=f"{what} by the hour, for dashboards",
    )
    return hours, Table(
        f"{kind}_changes",
        metadata,
        # Without the project: on SQLite an integer alone is the row's own id, and needs no separate index.
        Column("id", NUMBER, primary_key=True, autoincrement=False, comment=f"{writers}: later than all before it"),
        Column("project", Text, nullable=False, comment=f"{writers}: the tenant"),
        *_columns(writers, keys, Text),
        *_columns(writers, measures, Integer),
        comment=f"what changed of {what} and is not in {kind}_hours yet; triggers write it",
    )


def _columns(
    writer: str, meanings: dict[str, str], default: type[Integer] | type[Text], *, primary_key: bool = False
) -> Iterator[Column[Any]]:
    for name, meaning in meanings.items():
        yield Column(
            name,
            TYPES.get(name, default),
            primary_key=primary_key,
            nullable=False,
            comment=f"{writer}: {meaning}",
        )
