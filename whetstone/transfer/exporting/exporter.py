"""Run an export: read what a filter matches in chunks, and yield rows or the reasons why something is left out."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from sqlalchemy.exc import SQLAlchemyError

from whetstone.database.engine import snapshot
from whetstone.errors import WhetstoneError
from whetstone.transfer.exporting.files import Rows
from whetstone.transfer.exporting.rows import (
    CHAT,
    Attempt,
    Conversation,
    LeftOut,
    Tally,
    build_conversation,
    build_conversations,
    pair,
    rating_row,
    sft_row,
    trajectory_rows,
    why_left_out,
    why_no_example,
)
from whetstone.transfer.exporting.store import ExportReader, Filter

Kind = Literal["trajectories", "preferences", "sft", "ratings"]
Output = Iterator[dict[str, Any] | LeftOut]
"""Rows, and reasons for items that are left out."""


class FilterRefused(WhetstoneError):
    """The database rejects the filter, or is unavailable; the message is the database's own."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export."""

    kind: Kind
    matching: Filter
    include: frozenset[str] = frozenset()
    """Items to include that are left out by default; see `rows.INCLUDABLE`."""
    ids: bool = False
    min_reward: float | None = None
    source: Literal["best", "demonstrations", "both"] = "both"
    min_gap: float = 0.0
    all_pairs: bool = False
    limit: int | None = None


def run(url: str, options: ExportOptions, rows: Rows, progress: Callable[[int], None]) -> Tally:
    """Write what is wanted; `progress` is called from time to time with the number of rows.

    Raises:
        FilterRefused: the database rejects the filter or is unavailable.
        CannotWrite: the file cannot be written.
    """
    tally = Tally()
    try:
        with snapshot(url) as connection:
            for one in _output(ExportReader(connection, options.matching), options):
                if isinstance(one, LeftOut):
                    tally.left_out[one] += 1
                elif not rows.add(one):
                    tally.left_out[LeftOut.NOT_TABULAR] += 1
                else:
                    tally.rows += 1
                    if tally.rows % 100 == 0:
                        progress(tally.rows)
                    if tally.rows == options.limit:
                        break
    except SQLAlchemyError as error:
        raise FilterRefused(str(getattr(error, "orig", None) or error).strip()) from error
    return tally


def _output(reader: ExportReader, options: ExportOptions) -> Output:
    if options.kind == "trajectories":
        yield from _each(reader, options)
    elif options.kind == "preferences":
        yield from _preferences(reader, options)
    elif options.kind == "ratings":
        yield from (rating_row(rating) for some in reader.ratings() for rating in some)
    else:
        if options.source != "demonstrations":
            yield from _best(reader, options) if options.min_reward is None else _each(reader, options)
        if options.source != "best":
            yield from _demonstrations(reader, options)


def _each(reader: ExportReader, options: ExportOptions) -> Output:
    """Yield the rows of every trajectory; with `min_reward`, of those that have it."""
    for some in reader.in_order(min_reward=options.min_reward):
        completions = reader.completions([one.trajectory_id for one in some], ids=options.ids)
        for attempt in some:
            yield from _rows(attempt, build_conversations(completions[attempt.trajectory_id]), options)


def _best(reader: ExportReader, options: ExportOptions) -> Output:
    """Yield the best attempt of each group if it beats another; otherwise a failure would be imitated."""
    for left_out, members in _groups(reader, options):
        yield from left_out
        if len(members) < 2:
            yield LeftOut.ALONE
        elif not _gap(members[0], members[-1]) > 0:
            yield LeftOut.GAP
        else:
            yield from _rows(*members[0], options)


def _rows(attempt: Attempt, conversations: Sequence[Conversation], options: ExportOptions) -> Output:
    if why := why_left_out(attempt, conversations, options.include):
        yield why
    elif options.kind == "trajectories":
        yield from trajectory_rows(attempt, conversations, ids=options.ids)
    else:
        for one in conversations:
            yield why_no_example(one, options.include) or sft_row(attempt, one.messages, one.tools, "best")


def _demonstrations(reader: ExportReader, options: ExportOptions) -> Output:
    for some in reader.demonstrations():
        ids = {one.trajectory_id for one in some}
        attempts, completions = reader.attempts(ids), reader.completions(ids)
        for demonstration in some:
            attempt, answer = attempts[demonstration.trajectory_id], demonstration.message
            by_id = {one.id: one for one in completions[demonstration.trajectory_id]}
            conversation = build_conversation(by_id, demonstration.completion_id)
            if why := why_left_out(attempt, [conversation] if conversation.line else [], options.include):
                yield why
            elif any(one.endpoint != CHAT for one in conversation.line) or not isinstance(answer, Mapping):
                yield LeftOut.NOT_A_CHAT
            else:
                answered = conversation.last.answer is not None
                before = conversation.messages[: conversation.answers[-1] if answered else None]
                messages = [*before, {"role": "assistant", **answer}]
                yield sft_row(attempt, messages, conversation.tools, "demonstration")


Members = Sequence[tuple[Attempt, Sequence[Conversation]]]


def _groups(reader: ExportReader, options: ExportOptions) -> Iterator[tuple[list[LeftOut], Members]]:
    """Yield for each group the reasons why members are left out, and the other members, the best first."""
    for some in reader.in_groups():
        completions = reader.completions([one.trajectory_id for of_group in some for one in of_group])
        for of_group in some:
            members = [(one, build_conversations(completions[one.trajectory_id])) for one in of_group]
            reasons = [why_left_out(*member, options.include) for member in members]
            usable = [member for member, why in zip(members, reasons, strict=True) if why is None]
            yield [why for why in reasons if why is not None], usable


def _preferences(reader: ExportReader, options: ExportOptions) -> Output:
    """Yield the best of each group paired with the worst; or each member paired with each that is worse."""
    for left_out, members in _groups(reader, options):
        yield from left_out
        # Of several conversations use the last: the attempt ended with it.
        ended = [(attempt, conversations[-1]) for attempt, conversations in members]
        chats = [one for one in ended if one[1].last.endpoint == CHAT]
        yield from [LeftOut.NOT_A_CHAT] * (len(ended) - len(chats))
        if len(chats) < 2:
            yield LeftOut.ALONE
            continue
        pairs = list(combinations(chats, 2)) if options.all_pairs else [(chats[0], chats[-1])]
        apart = [both for both in pairs if _gap(*both) >= max(options.min_gap, math.ulp(0.0))]
        if not apart:
            yield LeftOut.GAP
        for better, worse in apart:
            yield why_no_example(better[1], options.include) or pair(better, worse)


def _gap(better: tuple[Attempt, Any], worse: tuple[Attempt, Any]) -> float:
    return (better[0].reward or 0.0) - (worse[0].reward or 0.0)
