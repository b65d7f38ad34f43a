"""Write the rows of `scale`: conversations as after months of use, and copies of them.

Nearly all were trained on; the last groups are unfinished. A copy is made by SQL, an hour older than the one before.
"""

from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

from sqlalchemy import Column, Connection, Table, text
from sqlalchemy.types import Text

from migrations import schema
from whetstone.database.types import Utc

PROJECT, POLICY = "default", "starter"
GROUPS, MEMBERS, TURNS = 1000, 4, 5
"""Sizes of the first block: 20,000 completions."""
UNDER_WAY, SCORED = 50, 20
"""Groups that are open, and groups that wait for a step; all others were trained on."""
TOKENS = 16
"""Tokens of each prompt's new part, and of each answer."""
BLOCK = "b00000"
"""Prefix of the ids of the first block; each copy has another number."""
TABLES = (schema.groups, schema.trajectories, schema.completions, schema.feedback)
HOUR = timedelta(hours=1)

Row = dict[str, Any]


def _rows(now: datetime) -> dict[Table, list[Row]]:
    """Return the rows of the small database."""
    groups, trajectories, completions, feedback = [], [], [], []
    for number in range(GROUPS):
        began = now - timedelta(seconds=GROUPS - number)
        left = GROUPS - number
        state = "open" if left <= UNDER_WAY else "scored" if left <= UNDER_WAY + SCORED else "trained"
        group_id = f"{BLOCK}-g{number}"
        groups.append(_group(group_id, state, began))
        for member in range(MEMBERS):
            trajectory_id = f"{BLOCK}-t{number}-{member}"
            trajectories.append(_trajectory(trajectory_id, group_id, state, member, began))
            completions += [_completion(trajectory_id, turn, began) for turn in range(TURNS)]
            feedback.append(_feedback(trajectory_id, state, member, began))
    return dict(zip(TABLES, (groups, trajectories, completions, feedback), strict=True))


def _group(group_id: str, state: str, began: datetime) -> Row:
    over = state != "open"
    return {
        "project": PROJECT,
        "id": group_id,
        "policy": POLICY,
        "formed_by": "prompt",
        "state": state,
        "size": MEMBERS if over else 0,
        "rewarded": MEMBERS if over else 0,
        "reward_mean": 0.5 if over else None,
        "reward_spread": 0.5 if over else None,
        "compared_with": "group" if over else None,
        "prompt_hash": history_of(group_id).hex(),
        "created_at": began,
        "closed_at": began if over else None,
        "step": 1 if state == "trained" else None,
    }


def _trajectory(trajectory_id: str, group_id: str, state: str, member: int, began: datetime) -> Row:
    state = {"open": "open", "scored": "rewarded"}.get(state, state)
    over = state != "open"
    return {
        "project": PROJECT,
        "id": trajectory_id,
        "group_id": group_id,
        "policy": POLICY,
        "split": "train",
        "no_train": False,
        "state": state,
        "reward": float(member % 2) if over else None,
        "reward_source": "trajectory" if over else None,
        "first_version": 0,
        "last_version": 0,
        "completions": TURNS,
        "sampled_tokens": TOKENS * TURNS,
        "tail_completion_id": f"{trajectory_id}-c{TURNS - 1}",
        "why_not_trained": {"rewarded": "waiting_step", "open": "not_ended"}.get(state),
        "trained_in_step": 1 if state == "trained" else None,
        "created_at": began,
        "last_seen_at": began,
        "ended_at": began if over else None,
        "placed_at": began,
        "prompt_hash": history_of(group_id).hex(),
    }


def _completion(trajectory_id: str, turn: int, began: datetime) -> Row:
    completion_id = f"{trajectory_id}-c{turn}"
    return {
        "project": PROJECT,
        "id": completion_id,
        "upstream_id": f"{BLOCK}-chatcmpl-{completion_id}",
        "call_id": completion_id,
        "choice": 0,
        "trajectory_id": trajectory_id,
        "turn": turn,
        "policy": POLICY,
        "policy_version": 0,
        "endpoint": "chat.completions",
        "streamed": False,
        "status": "complete",
        "follows": f"{trajectory_id}-c{turn - 1}" if turn else None,
        "new_messages": [{"role": "user", "content": f"question {turn} of {trajectory_id}"}],
        "response": {"role": "assistant", "content": f"answer {turn} of {trajectory_id}"},
        "prompt_token_ids": list(range(TOKENS)),
        "token_ids": list(range(TOKENS)),
        "inference_logprobs": [-0.5] * TOKENS,
        "sampling": {"temperature": 1.0},
        "finish_reason": "stop",
        "prompt_tokens": TOKENS * (2 * turn + 1),
        "completion_tokens": TOKENS,
        "total_ms": 1.5,
        "threaded_by": "content" if turn else "new",
        "history": history_of(completion_id),
        "created_at": began + timedelta(milliseconds=turn),
    }


def _feedback(trajectory_id: str, state: str, member: int, began: datetime) -> Row:
    return {
        "project": PROJECT,
        "id": f"{trajectory_id}-f",
        "target_kind": "trajectory",
        "target_id": trajectory_id,
        "trajectory_id": trajectory_id,
        "choice": 0,
        "source": "reward",
        "reward": float(member % 2),
        "final": True,
        "state": "applied" if state != "open" else "waiting",
        "due_at": began + 24 * HOUR if state == "open" else None,
        "created_at": began,
    }


def block_name(number: int) -> str:
    """Return the prefix of a block's ids."""
    return f"b{number:0{len(BLOCK) - 1}}"


def history_of(name: str) -> bytes:
    """Return a hash in place of that of the conversation after a completion."""
    return blake2b(name.encode(), digest_size=16).digest()


def fill(connection: Connection, now: datetime) -> None:
    """Write the first block."""
    for table, rows in _rows(now).items():
        insert(connection, table, rows)


def insert(connection: Connection, table: Table, rows: list[Row]) -> None:
    """Write rows; columns that they leave out are NULL."""
    connection.execute(table.insert(), [dict.fromkeys(table.c.keys()) | row for row in rows])


def write_conversation(connection: Connection, number: int) -> None:
    """Write one conversation of one turn."""
    now, name = datetime.now(UTC), f"new-{number}"
    trajectory = _trajectory(name, name, "open", 0, now) | {"group_id": None, "completions": 1}
    insert(connection, schema.trajectories, [trajectory])
    insert(connection, schema.completions, [_completion(name, 0, now)])


def copy(connection: Connection, number: int) -> None:
    """Write a copy of the first block as it was `number` hours before, with every group trained on."""
    for table in TABLES:
        columns = [column for column in table.c if column.computed is None]
        values = ", ".join(_copied(connection.dialect.name, table, column) for column in columns)
        names = ", ".join(f'"{column.name}"' for column in columns)
        connection.execute(
            text(f"INSERT INTO {table.name} ({names}) SELECT {values} FROM {table.name} WHERE id LIKE :block"),
            {"block": f"{BLOCK}-%", "number": block_name(number), "hours": f"-{number} hours", "older": number},
        )


def _copied(dialect: str, table: Table, column: Column[Any]) -> str:
    name, postgresql = f'"{column.name}"', dialect == "postgresql"
    over = {
        (schema.groups, "state"): f"{_UNDER_WAY} THEN 'trained' ELSE state END",
        (schema.trajectories, "state"): f"{_UNDER_WAY} THEN 'trained' ELSE state END",
        (schema.trajectories, "why_not_trained"): f"{_UNDER_WAY} THEN NULL ELSE why_not_trained END",
        (schema.completions, "history"): "decode(md5(:number || id), 'hex')" if postgresql else "randomblob(16)",
        (schema.feedback, "state"): "'used'",
        (schema.groups, "due_at"): "NULL",
        (schema.feedback, "due_at"): "NULL",
    }
    if (table, column.name) in over:
        return over[table, column.name]
    if column.name in _VERSIONS:
        older = f"({_VERSIONS[column.name]}, {name} - CAST(:older AS integer))"
        return f"CASE WHEN {name} IS NULL THEN NULL ELSE {'greatest' if postgresql else 'max'}{older} END"
    if isinstance(column.type, Utc):
        sqlite = f"strftime('%Y-%m-%d %H:%M:%f', {name}, :hours) || '000'"
        return f"{name} + CAST(:hours AS interval)" if postgresql else sqlite
    if isinstance(column.type, Text) and column.name in _IDS:
        return f"CASE WHEN {name} IS NULL THEN NULL ELSE :number || substr({name}, {len(BLOCK) + 1}) END"
    return name


_UNDER_WAY = "CASE WHEN state IN ('open', 'scored', 'rewarded')"
"""In a copy, unfinished groups are over."""
_VERSIONS = {"first_version": 0, "last_version": 0, "policy_version": 0, "trained_in_step": 1, "step": 1}
"""A copy has earlier versions and steps, down to the first."""
_IDS = {
    "id", "group_id", "tail_completion_id", "upstream_id", "call_id", "trajectory_id", "follows", "target_id",
    "prompt_hash",
}  # fmt: skip
