"""Define the columns of an export's Parquet file, with types that do not depend on the data.

Values without a fixed shape (tools, metadata, rare fields of a message) are JSON text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.database.types import as_json
from whetstone.errors import WhetstoneError

MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Fields of a message that have columns; all others go into `others`, as JSON text."""
_AS_JSON = ("tools", "metadata")
_LISTS_OF_MESSAGES = ("messages", "prompt", "chosen", "rejected")


class NotTabular(WhetstoneError):
    """The columns cannot store this message."""


def as_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with its messages as columns, and its values without a fixed shape as JSON text.

    Raises:
        NotTabular: a message contains more than text.
    """
    named = {name: value for name, value in row.items() if value is not None}
    messages = {name: [_message(one) for one in named[name]] for name in _LISTS_OF_MESSAGES if name in named}
    return {**row, **messages, **{name: as_json(named[name]) for name in _AS_JSON if name in named}}


def schema(kind: str, *, ids: bool) -> Any:
    """Return the pyarrow.Schema of a kind of row: trajectories, preferences or sft."""
    import pyarrow as pa

    text, number, whole, yes_no = pa.string(), pa.float64(), pa.int64(), pa.bool_()
    instant = pa.timestamp("us", tz="UTC")
    call = pa.struct({"id": text, "type": text, "function": pa.struct({"name": text, "arguments": text})})
    message = pa.struct(
        {
            "role": text, "content": text, "name": text, "tool_calls": pa.list_(call), "tool_call_id": text,
            "reasoning_content": text, "others": text,
        }
    )  # fmt: skip
    messages = pa.list_(message)
    if kind == "sft":
        return pa.schema(
            {
                "messages": messages, "tools": text, "source": text, "reward": number, "task": text, "group_id": text,
                "trajectory_id": text, "version": whole,
            }
        )  # fmt: skip
    if kind == "preferences":
        return pa.schema(
            {
                "prompt": messages, "chosen": messages, "rejected": messages, "tools": text, "chosen_reward": number,
                "rejected_reward": number, "task": text, "group_id": text, "chosen_trajectory_id": text,
                "rejected_trajectory_id": text, "chosen_version": whole, "rejected_version": whole,
            }
        )  # fmt: skip
    fields = {
        "trajectory_id": text, "group_id": text, "policy": text, "task": text, "split": text, "no_train": yes_no,
        "state": text, "reward": number, "reward_source": text, "first_version": whole, "last_version": whole,
        "why_not_trained": text, "trained_in_step": whole, "metadata": text, "end_user": text, "created_at": instant,
        "ended_at": instant, "conversation": whole, "endpoint": text, "versions": pa.list_(whole),
        "completion_ids": pa.list_(text), "messages": messages, "tools": text,
    }  # fmt: skip
    if ids:
        fields |= {
            "token_ids": pa.list_(pa.int32()), "sampled": pa.list_(yes_no),
            "inference_logprobs": pa.list_(pa.float32()),
        }  # fmt: skip
    return pa.schema(fields)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NotTabular
    texts = {name: message.get(name) for name in ("role", "name", "tool_call_id", "reasoning_content")}
    if not all(value is None or isinstance(value, str) for value in texts.values()):
        raise NotTabular
    others = {name: value for name, value in message.items() if name not in MESSAGE and value is not None}
    return {
        **texts,
        "content": _text(message.get("content")),
        "tool_calls": _calls(message.get("tool_calls")),
        "others": as_json(others) if others else None,
    }


def _text(content: Any) -> str | None:
    """Return a content's text, also if it came as parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise NotTabular
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        raise NotTabular
    return "".join(texts)


def _calls(calls: Any) -> list[dict[str, Any]] | None:
    if calls is None:
        return None
    try:
        converted = [
            {
                "id": call.get("id"),
                "type": call.get("type"),
                "function": {name: call["function"].get(name) for name in ("name", "arguments")},
            }
            for call in calls
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise NotTabular from error
    texts = [text for call in converted for text in (call["id"], call["type"], *call["function"].values())]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise NotTabular
    return converted
