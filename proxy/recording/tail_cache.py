"""The proxy's SQL for tails: the last state of each trajectory, from memory or read back along `follows`. Reads
only."""

from collections import OrderedDict

import msgspec
from sqlalchemy import Connection

from proxy.recording.prefix_delta import ANSWER, Tail, packed
from proxy.recording.turn_store import turns_to

MAX_TAILS = 4096
MAX_BYTES = 64_000_000
"""Most trajectories whose tail stays in memory (MAX_TAILS), and their total size (MAX_BYTES). Other tails are read from
the database when their trajectory continues."""
TOKEN_BYTES, MESSAGE_BYTES = 4, 100
"""Bytes of a token id, and of a message in addition to its text."""


class Tails:
    """The tails of the trajectories that were written last."""

    def __init__(self) -> None:
        self._tails: OrderedDict[tuple[str, str], tuple[Tail, int]] = OrderedDict()
        """Each with its size in bytes."""
        self._bytes = 0

    def knows(self, project: str, trajectory_id: str) -> bool:
        """Return whether that trajectory was written recently: most likely it still exists."""
        return (project, trajectory_id) in self._tails

    def keep(self, project: str, trajectory_id: str, tail: Tail | None) -> None:
        """Store the tail of a trajectory; None: nothing can follow it."""
        tails, key = self._tails, (project, trajectory_id)
        if (before := tails.pop(key, None)) is not None:
            self._bytes -= before[1]
        if tail is not None:
            messages = tail.messages
            size = TOKEN_BYTES * len(tail.token_ids) + MESSAGE_BYTES * len(messages) + sum(map(len, messages))
            tails[key] = tail, size
            self._bytes += size
        while len(tails) > MAX_TAILS or self._bytes > MAX_BYTES:
            self._bytes -= tails.popitem(last=False)[1][1]

    def forget(self) -> None:
        """Drop all tails: some may be from a transaction that did not commit."""
        self._tails.clear()
        self._bytes = 0

    def of(self, connection: Connection, project: str, trajectory_id: str, tail_id: str | None) -> Tail | None:
        """Return the trajectory's tail, which is the completion `tail_id`; None if nothing can follow it."""
        if tail_id is None:
            return None
        known, _ = self._tails.get((project, trajectory_id), (None, 0))
        return known if known is not None and known.completion_id == tail_id else _read(connection, project, tail_id)


def _read(connection: Connection, project: str, tail_id: str) -> Tail | None:
    token_ids: list[int] = []
    messages: list[msgspec.Raw] = []
    answers: list[int] = []
    tools = None
    for row in turns_to(connection, project, tail_id):
        if row.prompt_token_ids is None or row.token_ids is None:
            return None
        if token_ids:
            answers.append(len(messages))
            messages.append(ANSWER)
        token_ids += row.prompt_token_ids + row.token_ids
        messages += [msgspec.Raw(msgspec.json.encode(message)) for message in row.new_messages or ()]
        tools = tools if row.tools is None else row.tools
    tools_json = None if tools is None else msgspec.json.encode(tools, order="deterministic")
    return Tail(tail_id, packed(token_ids), messages, tuple(answers), tools_json)
