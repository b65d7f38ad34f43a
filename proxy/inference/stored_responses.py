"""Find stored responses, for requests that refer to them and for the routes that give them again.

They are read from SQL only, so that what was erased is not found. An answer may be on its way there: from this
process's journal, or another's. Who asks for an id that SQL does not have yet waits for what ended before.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from proxy.domain.answer_ids import item_id_of
from proxy.domain.stored_turn import StoredTurn
from proxy.errors import BadRequest, DatabaseAway, NotRecorded, PreviousNotFound, ResponseNotFound
from proxy.recording.recorder import Recorder
from proxy.recording.response_store import ResponseTables
from proxy.trajectories.peers import Peers
from proxy.wire.request_body import Body
from proxy.wire.responses.stored import (
    PREVIOUS,
    References,
    input_items,
    item_named,
    output_items,
    why_withheld,
    with_references,
)

MAX_INPUTS = 32
"""Most responses whose input a request may refer to by item: each is a query for a whole conversation."""
MAX_QUOTED = 100
"""Most characters of an id in an error message."""

Conversation = list[StoredTurn]
"""A response, last, and the turns before it."""


class _SearchResult(msgspec.Struct):
    """Several responses by id, as far as they exist."""

    conversations: Mapping[str, Conversation]
    erased: Collection[str] = ()


class StoredResponses:
    """The stored responses of one project. Used from one event loop."""

    def __init__(self, tables: ResponseTables, recorder: Recorder, peers: Peers) -> None:
        self._tables = tables
        self._recorder = recorder
        self._peers = peers

    async def with_references(self, body: Body, references: References) -> Body:
        """Return the request with the conversation in place of what it refers to.

        Raises:
            ResponseNotFound: it refers to something that is not there.
            BadRequest: it refers to the input of too many responses.
            DatabaseAway: the database does not answer.
        """
        previous = references.previous
        named = [item for name in references.items if (item := item_id_of(name)) is not None]
        # An item of an output is read without the turns before it.
        whole = {item.response_id for item in named if item.of_input}
        if len(whole) > MAX_INPUTS:
            raise BadRequest(f"items of the input of over {MAX_INPUTS} responses cannot be referred to", param="input")
        if previous is not None:
            whole.add(previous)
        result = await self._find(whole, {item.response_id for item in named} - whole)
        items = {name: _item(result, name) for name in references.items}
        before: list[Any] = []
        if previous is not None:
            reason = _reason(result, previous)
            if reason is not None:
                raise PreviousNotFound(_message("Previous response", previous, reason), param=PREVIOUS)
            conversation = result.conversations[previous]
            before = [*input_items(conversation), *output_items(conversation[-1])]
        return with_references(body, before, items)

    async def conversation(self, response_id: str) -> Conversation:
        """Return a stored response with the turns before it.

        Raises:
            ResponseNotFound: it is not there.
            DatabaseAway: the database does not answer.
        """
        result = await self._find({response_id}, ())
        reason = _reason(result, response_id)
        if reason is not None:
            raise ResponseNotFound(_message("Response", response_id, reason), param="response_id")
        return result.conversations[response_id]

    async def forget(self, response_id: str) -> None:
        """Make a stored response unknown. Its call stays recorded.

        Raises:
            ResponseNotFound: it is not there.
            DatabaseAway, NotRecorded: the database does not answer.
        """
        await self.conversation(response_id)
        await self._recorder.commit(lambda connection: self._tables.forget(connection, response_id))

    async def _find(self, whole: Collection[str], alone: Collection[str]) -> _SearchResult:
        """Return what is known of responses: of `whole` with the turns before them, of `alone` without. If any is
        missing, wait until SQL has the calls that ended before now."""
        # Looked at before the first read: what is written during it would be missing in both.
        arrived_s, has_own, has_others = time.time(), self._recorder.unwritten > 0, not self._peers.alone
        try:
            result = await asyncio.to_thread(self._read, whole, alone)
            is_complete = len(result.conversations) + len(result.erased) == len(whole) + len(alone)
            if not is_complete and (has_own or has_others):
                if has_own:
                    # The writer's transactions are in order of arrival: this one ends when all before it have.
                    await self._recorder.commit(lambda _connection: None)
                if has_others:
                    await self._peers.written(arrived_s)
                result = await asyncio.to_thread(self._read, whole, alone)
        except (SQLAlchemyError, NotRecorded) as error:
            raise DatabaseAway("stored responses are in the database, which does not answer; try again soon") from error
        return result

    def _read(self, whole: Collection[str], alone: Collection[str]) -> _SearchResult:
        """Query. This runs in a thread."""
        conversations = {one: self._tables.conversation(one) for one in whole}
        if alone:
            conversations |= {name: [turn] for name, turn in self._tables.turns(alone).items()}
        conversations = {name: turns for name, turns in conversations.items() if turns}
        missing = [one for one in (*whole, *alone) if one not in conversations]
        return _SearchResult(conversations, self._tables.erased(missing) if missing else ())


def _item(result: _SearchResult, name: str) -> dict[str, Any]:
    """Return the item with this id.

    Raises:
        ResponseNotFound: it is not there.
    """
    named = item_id_of(name)
    reason = "" if named is None else _reason(result, named.response_id)
    item = item_named(name, result.conversations[named.response_id]) if named is not None and reason is None else None
    if item is None:
        raise ResponseNotFound(_message("Item", name, reason or ""), param="input")
    return item


def _reason(result: _SearchResult, response_id: str) -> str | None:
    """Return why a response is not found, as the end of a sentence that may be empty; None if it is there."""
    if conversation := result.conversations.get(response_id):
        reason = why_withheld(conversation)
        return None if reason is None else f": {reason}"
    return ": it was erased" if response_id in result.erased else ""


def _message(kind: str, name: str, reason: str) -> str:
    return f"{kind} with id '{name[:MAX_QUOTED]}' not found{reason}."
