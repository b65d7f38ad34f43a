"""Build calls that ask a prompt again as evaluation: recorded, and never trained on. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec

from whetstone.transfer.exporting.rows import CHAT, Completion, build_conversation

NOT_SENT = frozenset({"stream", "stream_options", "n", "metadata", "store", "user"})
"""Fields of a recorded request that are not sent again: of the transport, and what the app adds about the call."""


def why_not_sent(completion: Completion) -> str | None:
    """Return why a recorded call cannot be sent again; None if it can."""
    if completion.endpoint != CHAT:
        return f"{completion.endpoint} is not sent again, only chat completions"
    if completion.status != "complete" or completion.answer is None:
        return "it has no whole answer"
    return "its prompt is not stored" if completion.new_messages is None else None


def body_of(
    by_id: Mapping[str, Completion], completion_id: str, sampling: Mapping[str, Any] | None, end_user: str | None
) -> dict[str, Any]:
    """Return the request of a recorded call without `model`: its messages, tools and sampling fields. `by_id`: the
    completions of its trajectory, up to it at least."""
    conversation = build_conversation(by_id, completion_id)
    body = {name: value for name, value in (sampling or {}).items() if name not in NOT_SENT}
    body["messages"] = conversation.messages[:-1]
    if conversation.tools:
        body["tools"] = conversation.tools
    if end_user is not None:
        # So that deleting a user's data deletes the copy.
        body["user"] = end_user
    return body


def evaluation_headers(trajectory_id: str, metadata: Mapping[str, Any], task: str | None) -> dict[str, str]:
    """Return the headers that make a call an evaluation of its own. Without a trajectory of its own, it would continue
    the recorded one."""
    headers = {"X-Trajectory-Id": trajectory_id, "X-Split": "eval", "X-No-Train": "true"}
    headers["X-Metadata"] = msgspec.json.encode(metadata).decode()
    return headers if task is None else {**headers, "X-Task": task}
