"""The proxy's SQL of tails: where each trajectory stands, from memory, or read back along `follows`. Reads only."""

from collections import OrderedDict

import msgspec
from sqlalchemy import Connection

from proxy.delta import ANSWER, Tail, digest
from proxy.store_turns import turns_to

KEPT = 4096
TOKENS_KEPT = 8_000_000
"""Trajectories whose tail stays in memory, and the tokens of all of them (40 bytes each); another one's is read from
the database when it goes on."""


class Tails:
    """The last turns of the trajectories that were written last."""

    def __init__(self) -> None:
        self._tails: OrderedDict[tuple[str, str], Tail] = OrderedDict()
        self._tokens = 0

    def knows(self, project: str, trajectory_id: str) -> bool:
        """Whether that trajectory was written lately: most likely it is still there."""
        return (project, trajectory_id) in self._tails

    def keep(self, project: str, trajectory_id: str, tail: Tail | None) -> None:
        """Remember where a trajectory stands now; None: nothing can follow it."""
        key = (project, trajectory_id)
        if (before := self._tails.pop(key, None)) is not None:
            self._tokens -= len(before.token_ids)
        if tail is not None:
            self._tails[key] = tail
            self._tokens += len(tail.token_ids)
        while len(self._tails) > KEPT or self._tokens > TOKENS_KEPT:
            self._tokens -= len(self._tails.popitem(last=False)[1].token_ids)

    def forget(self) -> None:
        """Drop all: some of it may be of a transaction that did not commit."""
        self._tails.clear()
        self._tokens = 0

    def of(self, connection: Connection, project: str, trajectory_id: str, tail_id: str | None) -> Tail | None:
        """The trajectory's tail, which is the completion `tail_id`; None where nothing can follow it."""
        if tail_id is None:
            return None
        known = self._tails.get((project, trajectory_id))
        return known if known is not None and known.completion_id == tail_id else _read(connection, project, tail_id)


def _read(connection: Connection, project: str, tail_id: str) -> Tail | None:
    token_ids: list[int] = []
    digests: list[bytes] = []
    tools = None
    for row in turns_to(connection, project, tail_id):
        if row.prompt_token_ids is None or row.token_ids is None:
            return None
        if token_ids:
            digests.append(ANSWER)
        token_ids += row.prompt_token_ids + row.token_ids
        digests += [digest(msgspec.Raw(msgspec.json.encode(message))) for message in row.new_messages or ()]
        tools = tools if row.tools is None else row.tools
    return Tail(
        tail_id, token_ids, digests, None if tools is None else msgspec.json.encode(tools, order="deterministic")
    )
