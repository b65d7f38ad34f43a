"""Show groups and trajectories: as tables with a row for each, and a trajectory as a conversation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from whetstone.domain.ids import version_id
from whetstone.terminal.listing import Listing
from whetstone.transfer.exporting.rows import Completion, Conversation, build_conversations

COLOURS = {"system": "dim", "developer": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
Row = Mapping[str, Any]


def conversations_of(trajectory: Row) -> list[Conversation]:
    """Return the conversations of a trajectory's `turns`."""
    names = {field.name for field in fields(Completion)}
    return build_conversations(
        Completion(**{"id": turn["completion_id"]}, **{name: value for name, value in turn.items() if name in names})
        for turn in trajectory["turns"]
    )


def trajectories_table(rows: Sequence[Row], now: datetime, *, wide: bool = False) -> RenderableType:
    """Return a table of trajectories; `wide`: whole, however narrow the terminal is."""
    columns = (
        *(Column(name) for name in ("trajectory", "version", "task", "state")),
        *(Column(name, justify="right") for name in ("reward", "turns")),
        Column("why not trained"),
        Column("began", justify="right"),
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        version = row["policy"] if row["last_version"] is None else version_id(row["policy"], row["last_version"])
        cells = (row["trajectory_id"], version, row["task"] or "", row["state"], number(row["reward"]))
        table.add_row(*map(_cell, cells), str(row["completions"]), _cell(_why(row)), ago(row["created_at"], now))
    return Listing(table, ids=("trajectory", "version", "task"), optional=("task", "turns", "version"), wide=wide)


def groups_table(rows: Sequence[Row], now: datetime, *, wide: bool = False) -> RenderableType:
    """Return a table of groups; `wide`: whole, however narrow the terminal is."""
    columns = (
        *(Column(name) for name in ("group", "policy", "formed by", "state")),
        *(Column(name, justify="right") for name in ("rewarded", "mean", "spread")),
        Column("reason"),
        Column("began", justify="right"),
    )
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        rewarded = f"{row['rewarded']}/{row['size']}" if row["size"] else "–"
        figures = (rewarded, number(row["reward_mean"]), number(row["reward_spread"]))
        cells = (row["group_id"], row["policy"], row["formed_by"], row["state"], *figures, row["reason"] or "")
        table.add_row(*map(_cell, cells), ago(row["created_at"], now))
    return Listing(table, ids=("group", "policy"), optional=("policy", "formed by"), wide=wide)


def group_shown(group: Row, now: datetime, *, wide: bool = False) -> RenderableType:
    """Show one group in full."""
    names = (
        "policy", "formed_by", "state", "reason", "size", "rewarded", "reward_mean", "reward_spread", "step",
        "created_at", "closed_at",
    )  # fmt: skip
    return Group(facts(group, "group_id", names), Text(), trajectories_table(group["members"], now, wide=wide))


def trajectory_shown(trajectory: Row) -> RenderableType:
    """Show one trajectory in full: its facts, then its conversations."""
    names = (
        "group_id", "policy", "task", "split", "state", "reward", "reward_source", "why_not_trained",
        "trained_in_step", "metadata", "created_at", "ended_at",
    )  # fmt: skip
    return Group(facts(trajectory, "trajectory_id", names), *_content(trajectory))


def _content(trajectory: Row) -> Iterator[RenderableType]:
    """Yield its conversations, the turns that are in none of them, and its feedback."""
    conversations = conversations_of(trajectory)
    for place, one in enumerate(conversations):
        if len(conversations) > 1:
            yield Text(f"\nconversation {place + 1} of {len(conversations)}", style="bold")
        yield from _render_messages(one)
    shown = {completion.id for one in conversations for completion in one.line}
    for turn in trajectory["turns"]:
        if turn["completion_id"] not in shown:
            why = plain(turn["error"] or turn["why_not_trained"] or turn["status"])
            yield Text(f"\nturn {turn['turn']} is in no conversation: {why}", style="red")
    for row in trajectory["feedback"]:
        yield Text(f"\nfeedback {row['source']} {_value(row)}: {row['state']}", style="magenta")


def facts(row: Row, title: str, names: Sequence[str]) -> RenderableType:
    """Return a table of the values that are not None, by name."""
    table = pairs_table()
    table.add_row(title, Text(str(row[title]), style="bold"))
    for name in names:
        if (value := row.get(name)) is not None:
            table.add_row(name, Text(_text(value)))
    return Listing(table)


def pairs_table() -> Table:
    """Return an empty table for a name and a value in each row."""
    return Table(
        Column(style="dim", no_wrap=True), Column(overflow="fold"), show_header=False, box=None, pad_edge=False
    )


def _render_messages(one: Conversation) -> Iterator[RenderableType]:
    by_position = dict(zip(one.answers, one.line, strict=False))
    for place, message in enumerate(one.messages):
        role = str(message.get("role", "prompt")) if isinstance(message, Mapping) else "prompt"
        head = Text(f"\n{role}", style=f"bold {COLOURS.get(role, '')}".strip())
        if (completion := by_position.get(place)) is not None:
            about = [f"v{completion.policy_version}", completion.finish_reason, completion.why_not_trained]
            head.append(f"  {' · '.join(part for part in about if part)}", style="dim")
        yield head
        yield Padding(Text(plain(text_with_calls(message))), (0, 0, 0, 2))


def plain(text: str) -> str:
    """Replace control characters: text from apps must not move the reader's cursor."""
    return "".join(one if one.isprintable() or one in "\n\t" else "·" for one in text)


def text_with_calls(message: Any) -> str:
    """Return a message's text, with its tool calls below."""
    if not isinstance(message, Mapping):
        return _text(message)
    content = message.get("content", message.get("prompt"))
    lines = [] if content in (None, "") else [_text(content)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            lines.append(f"→ {function.get('name')}({function.get('arguments') or ''})")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return escape(plain(text))


def _why(row: Row) -> str:
    return f"step {row['trained_in_step']}" if row["trained_in_step"] is not None else row["why_not_trained"] or ""


def _value(row: Row) -> str:
    parts = [number(row["reward"]) if row["reward"] is not None else "", row["comment"] or ""]
    return plain(" ".join(part for part in parts if part))


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, float):
        return number(value)
    return plain(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def number(value: float | None) -> str:
    """Format a number; None becomes a dash, not 0."""
    return "–" if value is None else f"{value:.4g}"


def ago(then: datetime | None, now: datetime) -> str:
    """Format the time since then, in the largest unit that fits."""
    if then is None:
        return "–"
    seconds = max(0.0, (now - then).total_seconds())
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
