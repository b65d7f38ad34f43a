"""Run an export: read what a filter matches in chunks, and yield rows or the reasons why something is left out."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.exc import SQLAlchemyError

from whetstone.database.engine import snapshot
from whetstone.transfer.exporting.files import Rows
from whetstone.transfer.exporting.rows import (
    CHAT,
    Attempt,
    Conversation,
    LeftOut,
    Tally,
    conversation,
    conversations,
    pair,
    sft_row,
    trajectory_rows,
    why_left_out,
    why_no_example,
)
from whetstone.transfer.exporting.store import Filter, Reading

Kind = Literal["trajectories", "preferences", "sft"]
Row = dict[str, Any]
Told = Iterator[Row | LeftOut]
"""Rows, and reasons for items that are left out."""


class FilterRefused(Exception):
    """The database rejects the filter, or is unavailable; the message is the database's own."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export."""

    kind: Kind
    matching: Filter
    include: frozenset[str] = frozenset()
    """Items to include that are left out by default; see `rows.ASKED_FOR`."""
    ids: bool = False
    min_reward: float | None = None
    source: Literal["best", "demonstrations", "both"] = "both"
    min_gap: float = 0.0
    all_pairs: bool = False
    limit: int | None = None


def run(url: str, wanted: Wanted, rows: Rows, progress: Callable[[int], None]) -> Tally:
    """Write what is wanted; `progress` is called from time to time with the number of rows.

    Raises:
        FilterRefused: the database rejects the filter or is unavailable.
        CannotWrite: the file cannot be written.
    """
    tally = Tally()
    try:
        with snapshot(url) as connection:
            for one in _told(Reading(connection, wanted.matching), wanted):
                if isinstance(one, LeftOut):
                    tally.left_out[one] += 1
                elif not rows.add(one):
                    tally.left_out[LeftOut.NOT_TABULAR] += 1
                else:
                    tally.rows += 1
                    if tally.rows % 100 == 0:
                        progress(tally.rows)
                    if tally.rows == wanted.limit:
                        break
    except SQLAlchemyError as error:
        raise FilterRefused(str(getattr(error, "orig", None) or error).strip()) from error
    return tally


def _told(reading: Reading, wanted: Wanted) -> Told:
    if wanted.kind == "trajectories":
        yield from _trajectories(reading, wanted)
    elif wanted.kind == "preferences":
        yield from _preferences(reading, wanted)
    else:
        if wanted.source != "demonstrations":
            yield from _best(reading, wanted) if wanted.min_reward is None else _worth_it(reading, wanted)
        if wanted.source != "best":
            yield from _demonstrations(reading, wanted)


def _trajectories(reading: Reading, wanted: Wanted) -> Told:
    for some in reading.in_order(min_reward=wanted.min_reward):
        said = reading.said([one.trajectory_id for one in some], ids=wanted.ids)
        for attempt in some:
            held = conversations(said[attempt.trajectory_id])
            if why := why_left_out(attempt, held, wanted.include):
                yield why
            else:
                yield from trajectory_rows(attempt, held, ids=wanted.ids)


def _worth_it(reading: Reading, wanted: Wanted) -> Told:
    for some in reading.in_order(min_reward=wanted.min_reward):
        said = reading.said([one.trajectory_id for one in some])
        for attempt in some:
            yield from _examples(attempt, conversations(said[attempt.trajectory_id]), wanted)


def _best(reading: Reading, wanted: Wanted) -> Told:
    """Yield the best attempt of each group if it beats another; otherwise a failure would be imitated."""
    for of_group in _groups(reading, wanted):
        told = [one for one in of_group if isinstance(one, LeftOut)]
        yield from told
        members = [one for one in of_group if not isinstance(one, LeftOut)]
        if len(members) < 2:
            yield LeftOut.ALONE
        elif not _gap(members[0], members[-1]) > 0:
            yield LeftOut.GAP
        else:
            yield from _examples(*members[0], wanted)


def _examples(attempt: Attempt, held: Sequence[Conversation], wanted: Wanted) -> Told:
    if why := why_left_out(attempt, held, wanted.include):
        yield why
        return
    for one in held:
        yield why_no_example(one, wanted.include) or sft_row(attempt, one.messages, one.tools, "best")


def _demonstrations(reading: Reading, wanted: Wanted) -> Told:
    for some in reading.demonstrations():
        ids = {one.trajectory_id for one in some}
        attempts, said = reading.attempts(ids), reading.said(ids)
        for shown in some:
            by_id = {one.id: one for one in said[shown.trajectory_id]}
            held = conversation(by_id, shown.completion_id)
            if why := why_left_out(attempts[shown.trajectory_id], [held] if held.line else [], wanted.include):
                yield why
            elif any(one.endpoint != CHAT for one in held.line) or not isinstance(shown.message, Mapping):
                yield LeftOut.NOT_A_CHAT
            else:
                answered = held.answers[-1] if held.last.answer is not None else len(held.messages)
                messages = [*held.messages[:answered], {"role": "assistant", **shown.message}]
                yield sft_row(attempts[shown.trajectory_id], messages, held.tools, "demonstration")


Member = tuple[Attempt, Sequence[Conversation]]


def _groups(reading: Reading, wanted: Wanted) -> Iterator[list[Member | LeftOut]]:
    """Yield each group's members, the best first, and the reasons why others are left out."""
    for some in reading.in_groups():
        said = reading.said([one.trajectory_id for of_group in some for one in of_group])
        for of_group in some:
            members: list[Member | LeftOut] = []
            for attempt in of_group:
                held = conversations(said[attempt.trajectory_id])
                members.append(why_left_out(attempt, held, wanted.include) or (attempt, held))
            yield members


def _preferences(reading: Reading, wanted: Wanted) -> Told:
    for of_group in _groups(reading, wanted):
        members: list[tuple[Attempt, Conversation]] = []
        for one in of_group:
            if isinstance(one, LeftOut):
                yield one
            elif one[1][-1].last.endpoint != CHAT:
                yield LeftOut.NOT_A_CHAT
            else:
                # Of several conversations use the last: the attempt ended with it.
                members.append((one[0], one[1][-1]))
        yield from _pairs(members, wanted)


def _pairs(members: Sequence[tuple[Attempt, Conversation]], wanted: Wanted) -> Told:
    """Yield the best paired with the worst; or each member paired with each that is worse."""
    if len(members) < 2:
        yield LeftOut.ALONE
        return
    both = [(members[0], members[-1])]
    if wanted.all_pairs:
        both = [(one, other) for place, one in enumerate(members) for other in members[place + 1 :]]
    least = max(wanted.min_gap, math.ulp(0.0))
    apart = [(one, other) for one, other in both if _gap(one, other) >= least]
    if not apart:
        yield LeftOut.GAP
    for better, worse in apart:
        yield why_no_example(better[1], wanted.include) or pair(better, worse)


def _gap(better: tuple[Attempt, Any], worse: tuple[Attempt, Any]) -> float:
    return (better[0].reward or 0.0) - (worse[0].reward or 0.0)
