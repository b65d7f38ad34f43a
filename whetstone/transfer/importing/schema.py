"""Parse and check a line of a log in OpenAI's format: its conversation and its reward.

A line has one of three forms. A conversation, as in fine-tuning files: `{"messages": [..., assistant]}`; every answer
in it is a turn, except those with `"weight": 0`. A served call, as gateways log them:
`{"request": {...}, "response": {...}}`. A preference, as TRL has them:
`{"prompt": [...], "chosen": [..., assistant], "rejected": [..., assistant]}`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from whetstone.domain.ids import ID
from whetstone.domain.reward_bounds import MAX_REWARD
from whetstone.errors import WhetstoneError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_SAMPLING = ("model", "messages", "tools", "metadata", "user")
"""Fields of a request that are stored elsewhere."""
PREFERENCE = {"chosen": 1.0, "rejected": 0.0}
"""The sides of a preference, and the reward of each where the line has none."""
MILLISECONDS = 1e11
"""A larger number of seconds is taken as milliseconds: it would be in the year 5138."""
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
Message = dict[str, Any]


class BadLine(WhetstoneError):
    """The line cannot be imported; the message says why."""


class NoAnswer(WhetstoneError):
    """The line is a call without an answer: there is nothing to import."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The fields of a line that describe its trajectory."""

    trajectory_id: str | None
    group_id: str | None
    task: str | None
    split: str
    no_train: bool
    reward: float | None
    metadata: Mapping[str, Any] | None
    end_user: str | None
    created_at: datetime | None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A conversation with its answers."""

    messages: Sequence[Message]
    answers: Sequence[int]
    """Positions among all messages of the answers that are turns; the last message is one of them."""
    tools: Sequence[Any] | None
    tags: Tags
    sampling: Mapping[str, Any]
    is_call: bool = False
    """Whether it is one served call: the conversation before its answer may be another line's."""
    response_id: str | None = None
    choice: int = 0
    choices: int = 1
    """Number of answers of the call, or of the two sides of a preference."""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    as_logged: Sequence[Message] | None = None
    """The messages including NUL, which no database can store but which counts in their hashes; None without NUL."""


def read_line(line: bytes, reward_field: str = "reward", task: str | None = None) -> list[LogEntry]:
    """Return a line's conversation, one per answer of a call, or the two of a preference, the better one first.

    `task`: the label of lines without one.

    Raises:
        BadLine: it is not valid.
        NoAnswer: it is a call without an answer.
    """
    try:
        row = msgspec.json.decode(line)
        # PostgreSQL's texts cannot contain NUL.
        stored = msgspec.json.decode(_NUL.sub(rb"\1\\ufffd", line)) if b"u0000" in line else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"no JSON: {error}") from error
    if stored is None:
        return _entries(row, reward_field, task)
    pairs = zip(_entries(stored, reward_field, task), _entries(row, reward_field, task), strict=True)
    return [replace(one, as_logged=original.messages) for one, original in pairs]


def _entries(row: Any, reward_field: str, task: str | None) -> list[LogEntry]:
    _require(isinstance(row, dict), "a line must be a JSON object")
    if "request" in row or "response" in row:
        return list(_call(row, reward_field, task))
    if "chosen" in row or "rejected" in row:
        return _preference(row, task)
    _require("messages" in row, 'has neither "messages" nor "request" and "response" nor "chosen" and "rejected"')
    messages = _messages(row["messages"], "messages")
    answers = _answers(messages, 0)
    _require(answers[-1:] == [len(messages) - 1], "the last message must be the assistant's")
    tags = _tags(row, {}, reward_field, task, None)
    return [LogEntry(_without_weights(messages), answers, _tools(row.get("tools")), tags, {})]


def _preference(row: Mapping[str, Any], task: str | None) -> list[LogEntry]:
    prompt = _messages(row.get("prompt"), "prompt")
    entries = []
    for place, (name, otherwise) in enumerate(PREFERENCE.items()):
        messages = [*prompt, *_messages(row.get(name), name)]
        answers = _answers(messages, len(prompt))
        _require(answers[-1:] == [len(messages) - 1], f"the last message of {name} must be the assistant's")
        tags = _tags(row, {}, f"{name}_reward", task, None)
        tags = replace(tags, reward=otherwise if tags.reward is None else tags.reward)
        entry = LogEntry(_without_weights(messages), answers, _tools(row.get("tools")), tags, {})
        entries.append(replace(entry, choice=place, choices=len(PREFERENCE)))
    better, worse = (entry.tags.reward or 0.0 for entry in entries)
    _require(better > worse, f"chosen_reward {better:g} is not above rejected_reward {worse:g}")
    return entries


def _answers(messages: Sequence[Message], start: int) -> list[int]:
    """Return the positions of the answers from `start` on that are turns."""
    return [
        at for at, one in enumerate(messages) if at >= start and one["role"] == "assistant" and one.get("weight") != 0
    ]


def _without_weights(messages: Sequence[Message]) -> list[Message]:
    return [{name: value for name, value in one.items() if name != "weight"} for one in messages]


def _call(row: Mapping[str, Any], reward_field: str, task: str | None) -> Iterator[LogEntry]:
    request, response = _body(row, "request"), _body(row, "response")
    choices = response.get("choices")
    if not choices:
        if response.get("error") is not None or row.get("error") is not None or choices == []:
            raise NoAnswer
        raise BadLine('response has no "choices"; only answers of chat completions can be imported')
    is_list = isinstance(choices, list) and all(isinstance(one, dict) for one in choices)
    _require(is_list, "response.choices must be a list of objects")
    before = _messages(request.get("messages"), "request.messages")
    tags = _tags(row, request, reward_field, task, response.get("created"))
    usage = response["usage"] if isinstance(response.get("usage"), dict) else {}
    response_id = response.get("id") if isinstance(response.get("id"), str) else None
    if isinstance(model := response.get("model") or request.get("model"), str):
        # No column exists for the model that answered.
        metadata = tags.metadata or {}
        tags = replace(tags, metadata={**metadata, "model": metadata.get("model", model)})
    for place, choice in enumerate(choices):
        answer = _message(choice.get("message"), f"response.choices[{place}].message")
        _require(answer["role"] == "assistant", f"response.choices[{place}].message must be the assistant's")
        finish_reason = choice.get("finish_reason")
        yield LogEntry(
            messages=[*before, answer],
            answers=[len(before)],
            tools=_tools(request.get("tools")),
            tags=tags,
            sampling={name: value for name, value in request.items() if name not in NO_SAMPLING},
            is_call=True,
            response_id=response_id,
            choice=place,
            choices=len(choices),
            finish_reason=finish_reason if isinstance(finish_reason, str) else None,
            prompt_tokens=_count(usage, "prompt_tokens"),
            # The count covers all answers and cannot be divided among several.
            completion_tokens=_count(usage, "completion_tokens") if len(choices) == 1 else None,
        )


def _body(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a request or response; some logs wrap it: `{"body": {...}}`."""
    body: Any = row.get(name)
    if isinstance(body, dict) and isinstance(body.get("body"), dict):
        body = body["body"]
    if name == "response" and body is None:
        raise NoAnswer
    _require(isinstance(body, dict), f'"{name}" must be an object')
    return dict(body)


def _messages(value: Any, name: str) -> list[Message]:
    _require(isinstance(value, list) and len(value) > 0, f"{name} must be a list of messages")
    return [_message(one, f"{name}[{place}]") for place, one in enumerate(value)]


def _message(one: Any, name: str) -> Message:
    _require(isinstance(one, dict), f"{name} must be an object")
    message: Message = one
    role, content = message.get("role"), message.get("content")
    _require(role in ROLES, f"{name}.role must be one of {', '.join(ROLES)}, not {role!r}")
    is_text = content is None or isinstance(content, str | list)
    _require(is_text, f"{name}.content must be text, a list of parts, or null")
    says = content is not None or any(message.get(field) for field in ("tool_calls", "function_call", "refusal"))
    _require(role != "assistant" or says, f"{name} says nothing: it has neither content nor tool calls")
    return message


def _tools(value: Any) -> list[Any] | None:
    _require(value is None or isinstance(value, list), "tools must be a list")
    return value or None


def _tags(row: Mapping[str, Any], request: Mapping[str, Any], field: str, task: str | None, answered: Any) -> Tags:
    """Return the tags of the line, else those of the request's `metadata`. `answered`: the time in the response."""
    created = row.get("created_at", row.get("timestamp"))
    of_request: Any = request.get("metadata")
    request_metadata: Mapping[str, Any] = of_request if isinstance(of_request, dict) else {}
    own = row.get("metadata")
    _require(own is None or isinstance(own, dict), "metadata must be an object")
    fields = {**request_metadata, **row}
    named = {"trajectory_id", "group_id", "task", "split", "no_train"}
    metadata = {name: value for name, value in request_metadata.items() if name not in named} | (own or {})
    split = fields.get("split") or "train"
    _require(split in ("train", "eval"), f"split must be train or eval, not {split!r}")
    return Tags(
        trajectory_id=_id(fields, "trajectory_id"),
        group_id=_id(fields, "group_id"),
        task=_text(fields, "task") or task,
        split=split,
        no_train=_flag(fields, "no_train"),
        reward=_reward(row, field),
        metadata=metadata or None,
        end_user=_text(row, "end_user") or _text(request, "user"),
        created_at=_instant(answered if created is None else created),
    )


def _id(fields: Mapping[str, Any], name: str) -> str | None:
    value: str | None = fields.get(name)
    is_id = value is None or (isinstance(value, str) and ID.fullmatch(value) is not None)
    _require(is_id, f"{name} must be 1 to 128 of A-Z a-z 0-9 . _ : @ -")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value: str | None = fields.get(name)
    _require(value is None or isinstance(value, str), f"{name} must be text")
    return value


def _reward(row: Mapping[str, Any], field: str) -> float | None:
    value: Any = row
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        return None
    is_reward = isinstance(value, int | float) and abs(value) <= MAX_REWARD
    _require(is_reward, f"{field} must be a finite number within ±{MAX_REWARD:g}, not {value!r}")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    """Parse a flag strictly: a marked line must never count as unmarked, however the flag is spelled."""
    value = fields.get(name)
    text = str(False if value is None else value).strip().lower()
    _require(text in ("false", "0", "true", "1"), f"{name} must be true or false, not {value!r}")
    return text in ("true", "1")


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and 0 <= value < 2**31 else None


def _instant(value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value / 1000 if value > MILLISECONDS else value, UTC)
        instant = datetime.fromisoformat(value)
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError, OSError) as error:
        raise BadLine(f"{value!r} is no time: write seconds since 1970, or 2026-01-31T12:00:00Z"[:200]) from error


def _require(holds: bool, otherwise: str) -> None:
    """Raise BadLine with the message `otherwise` unless the condition holds."""
    if not holds:
        raise BadLine(otherwise[:200])
