"""The proxy's SQL of calls: served calls into trajectories, completions and groups. Writes; decides nothing.

Many calls cost few statements: what they write to is locked at once, counted on in memory, and written at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import BindParameter, Connection, Select, Table, bindparam, select

from migrations import schema
from migrations.database import chunks, insert_all_new
from proxy.call import Call, Choice, nothing_said
from proxy.delta import Added, Tail, added, digest, tail_of
from proxy.storable import storable_row
from proxy.store_erased import not_erased
from proxy.store_retries import asked_again, supersede
from proxy.store_tails import Tails

c, t = schema.completions.c, schema.trajectories.c
_ITS_PROJECT: BindParameter[str] = bindparam("its_project")
_ITS_ID: BindParameter[str] = bindparam("its_id")
_IDS: BindParameter[list[str]] = bindparam("ids", expanding=True)

# Made once: to make a statement costs as much as to execute it.
_LOCK = (
    select(t.project, t.id, t.state, t.completions, t.sampled_tokens, t.tail_completion_id, t.last_seen_at)
    .where(t.project == _ITS_PROJECT, t.id.in_(_IDS))
    # In one order, whoever locks several.
    .order_by(t.id)
    .with_for_update()
)
_THERE = select(c.project, c.id).where(c.project == _ITS_PROJECT, c.id.in_(_IDS))
_UPDATE = schema.trajectories.update().where(t.project == _ITS_PROJECT, t.id == _ITS_ID)
_CONTINUE = schema.completions.update().where(c.project == _ITS_PROJECT, c.id == _ITS_ID, c.continued_by.is_(None))

_Key = tuple[str, str]
"""Project and id."""


@dataclass(frozen=True)
class _Spoken:
    """One choice of a call, on its way into the tables."""

    call: Call
    choice: Choice
    digests: list[bytes]
    """Of the call's messages."""
    group_id: str | None
    formed_by: str
    retry_of: str | None

    @property
    def key(self) -> _Key:
        return self.call.project, self.call.completion_id(self.choice)

    @property
    def group(self) -> _Key:
        return self.call.project, self.group_id or ""

    @property
    def trajectory(self) -> _Key:
        return self.call.project, self.call.trajectory_of(self.choice)


@dataclass
class _Standing:
    """Where a trajectory stands, with what is about to be written to it. Its row is locked."""

    project: str
    id: str
    state: str
    completions: int
    sampled_tokens: int
    tail_completion_id: str | None
    last_seen_at: datetime
    tail: Tail | None = None
    tail_known: bool = False
    last_version: int | None = None
    """Of what is about to be written; None while nothing is."""

    @property
    def changed(self) -> dict[str, Any]:
        """The parameters of `_UPDATE`."""
        return {
            "its_project": self.project,
            "its_id": self.id,
            "completions": self.completions,
            "sampled_tokens": self.sampled_tokens,
            "last_version": self.last_version,
            "tail_completion_id": self.tail_completion_id,
            "last_seen_at": self.last_seen_at,
        }


class CallRows:
    """The rows of calls. Used from one thread, that of the writer."""

    def __init__(self) -> None:
        self.tails = Tails()

    def write(self, connection: Connection, calls: Sequence[Call]) -> None:
        """Add calls with all their choices, in one transaction of the caller's. A call that is there already stays; one
        that was to be deleted before it came here is left out."""
        batch: list[_Spoken] = []
        for call in not_erased(connection, calls):
            # What it asks again may be among those that are about to be written.
            if call.request_digest and any(one.call.request_digest == call.request_digest for one in batch):
                self._write(connection, batch)
                batch = []
            if retried := asked_again(connection, call):
                self._write(connection, batch)
                batch = []
                supersede(connection, call, retried)
            batch += _spoken(call, {row.choice: row.id for row in retried})
        self._write(connection, batch)

    def _write(self, connection: Connection, batch: Sequence[_Spoken]) -> None:
        _insert(connection, schema.groups, {one.group: _group(one) for one in reversed(batch) if one.group_id})
        standings = self._stand(connection, batch)
        there = {(row.project, row.id) for row in _rows(connection, _THERE, (one.key for one in batch))}
        rows, continued = [], []
        for one in batch:
            if one.key in there:
                continue
            there.add(one.key)
            rows.append(storable_row(self._add(connection, one, standings[one.trajectory])))
            if one.call.extends is not None and one.call.status == "complete" and one.choice.index == 0:
                its = {"its_project": one.call.project, "its_id": one.call.extends}
                continued.append(its | {"continued_by": one.call.id})
        if rows:
            # On its id only: a turn that another writer took must be an error, not a record lost in silence.
            insert_all_new(connection, schema.completions, rows, on=["project", "id"])
        if changed := [standing.changed for standing in standings.values() if standing.last_version is not None]:
            connection.execute(_UPDATE, changed)
        if continued:
            connection.execute(_CONTINUE, continued)

    def _stand(self, connection: Connection, batch: Sequence[_Spoken]) -> dict[_Key, _Standing]:
        """Lock the trajectories, those that begin here included: their turns are numbered one after the other, whoever
        else writes to them."""
        first = {one.trajectory: one for one in reversed(batch)}
        begun = {key: _trajectory(one) for key, one in first.items() if not self.tails.knows(*key)}
        _insert(connection, schema.trajectories, begun)
        standings = _locked(connection, first)
        if gone := {key: _trajectory(one) for key, one in first.items() if key not in standings}:
            # Deleted meanwhile.
            _insert(connection, schema.trajectories, gone)
            standings |= _locked(connection, gone)
        return standings

    def _add(self, connection: Connection, one: _Spoken, to: _Standing) -> dict[str, Any]:
        """The row of a completion, counted to its trajectory."""
        call, choice = one.call, one.choice
        _, completion_id = one.key
        if not to.tail_known:
            to.tail, to.tail_known = self.tails.of(connection, *one.trajectory, to.tail_completion_id), True
        new = added(to.tail, call.messages, one.digests, call.prompt_token_ids, call.tools)
        row = _completion(one, new, to)
        # What broke off after a later call (its retry) had ended is not what it goes on from. Ids sort by time.
        if call.status == "complete" or to.tail_completion_id is None or completion_id > to.tail_completion_id:
            to.tail_completion_id = completion_id
            to.tail = tail_of(completion_id, new.digests, call.prompt_token_ids, choice.token_ids, call.tools)
            self.tails.keep(*one.trajectory, to.tail)
        to.completions += 1
        to.sampled_tokens += choice.tokens or 0
        to.last_version = call.policy_version
        # A slow call that began earlier must not make it look idle.
        to.last_seen_at = max(to.last_seen_at, call.created_at)
        return row


def _spoken(call: Call, retried: Mapping[int, str]) -> list[_Spoken]:
    """What a call said, choice by choice; `retried`: the completions it repeats, by choice."""
    digests = [digest(message) for message in call.messages]
    choices = call.choices or (nothing_said(0),)
    group_id, formed_by = call.address.group_id, "header"
    if call.threaded_by in ("shadow", "evaluation"):
        formed_by = call.threaded_by
    elif group_id is None and len(choices) > 1:
        group_id, formed_by = f"{call.siblings}.choices", "choices"
    return [_Spoken(call, choice, digests, group_id, formed_by, retried.get(choice.index)) for choice in choices]


def _group(one: _Spoken) -> dict[str, Any]:
    call = one.call
    return {
        "project": call.project,
        "id": one.group_id,
        "policy": call.policy,
        "formed_by": one.formed_by,
        "state": "open",
        "size": 0,
        "rewarded": 0,
        "target_size": call.address.group_size,
        "created_at": call.created_at,
    }


def _trajectory(one: _Spoken) -> dict[str, Any]:
    call = one.call
    return {
        "project": call.project,
        "id": call.trajectory_of(one.choice),
        "group_id": one.group_id,
        "policy": call.policy,
        "task": call.address.task,
        "split": call.address.split,
        "no_train": call.address.no_train,
        "state": "open",
        "first_version": call.policy_version,
        "last_version": call.policy_version,
        "completions": 0,
        "sampled_tokens": 0,
        "metadata": call.address.metadata,
        "created_at": call.created_at,
        "last_seen_at": call.created_at,
        "prompt_hash": call.prompt_hash,
        # A further choice leaves the trajectory that the first one goes on with.
        "continues": call.continues if one.choice.index == 0 else call.extends or call.continues,
        "end_user": call.end_user,
    }


def _completion(one: _Spoken, new: Added, to: _Standing) -> dict[str, Any]:
    call, choice = one.call, one.choice
    history = call.history(choice)
    why_not_trained = call.why_not_trained(choice)
    if to.state not in ("open", "ended"):
        why_not_trained = why_not_trained or "trajectory_over"
    return {
        "project": call.project,
        "id": call.completion_id(choice),
        "upstream_id": call.upstream_id,
        "call_id": call.id,
        "choice": choice.index,
        "trajectory_id": call.trajectory_of(choice),
        "turn": to.completions,
        "policy": call.policy,
        "policy_version": call.policy_version,
        "endpoint": call.endpoint,
        "streamed": call.streamed,
        "status": call.status,
        "error": call.error,
        "follows": new.follows,
        "end_user": call.end_user,
        "key_id": call.key_id,
        "new_messages": [msgspec.json.decode(message) for message in new.messages],
        "tools": None if new.tools is None else msgspec.json.decode(new.tools),
        "response": choice.message or None,
        "response_text": choice.text,
        "prompt_token_ids": new.prompt_token_ids,
        "token_ids": choice.token_ids,
        "inference_logprobs": choice.logprobs,
        "sampling": msgspec.json.decode(call.sampling),
        "finish_reason": choice.finish_reason,
        "prompt_tokens": call.prompt_tokens if call.prompt_token_ids is None else len(call.prompt_token_ids),
        "completion_tokens": choice.tokens,
        "ttft_ms": call.ttft_ms,
        "total_ms": call.total_ms,
        "retry_of": one.retry_of,
        "request_digest": None if call.status == "complete" else call.request_digest,
        "turn_key": call.address.turn_key,
        "reply": call.reply if choice.index == 0 else None,
        "threaded_by": call.threaded_by,
        "why_not_trained": why_not_trained,
        "created_at": call.created_at,
        "history": history.conversation,
        "tool_history": history.tool_calls,
        "redactions": call.redactions,
    }


def _insert(connection: Connection, table: Table, rows: Mapping[_Key, Mapping[str, Any]]) -> None:
    """Insert those that are not there, in one order, whoever inserts several."""
    if rows:
        insert_all_new(connection, table, [storable_row(row) for _, row in sorted(rows.items())])


def _locked(connection: Connection, trajectories: Iterable[_Key]) -> dict[_Key, _Standing]:
    return {(row.project, row.id): _Standing(*row) for row in _rows(connection, _LOCK, trajectories)}


def _rows(connection: Connection, query: Select[Any], keys: Iterable[_Key]) -> Iterator[Any]:
    """What a query finds, project by project."""
    ids = defaultdict(set)
    for project, its_id in keys:
        ids[project].add(its_id)
    for project, of_project in sorted(ids.items()):
        for some in chunks(of_project):
            yield from connection.execute(query, {"its_project": project, "ids": some})
