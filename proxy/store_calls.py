"""The proxy's SQL of calls: a served call into trajectories, completions and groups. Writes; decides nothing.

What a conversation repeats is stored once: each trajectory's last turn stays in memory, or is read back.
"""

from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from sqlalchemy import Connection, and_, bindparam, or_, select

from migrations import schema
from proxy.call import Call, Choice, nothing_said
from proxy.delta import ANSWER, Tail, added, digest, tail_of
from proxy.repeats import WINDOW_S
from proxy.storable import insert_storable
from proxy.store_erased import Erased
from proxy.store_turns import turns_to
from whetstone.reasons import WhyNotTrained

TAILS_KEPT = 4096
TAIL_TOKENS_KEPT = 8_000_000
"""Trajectories whose tail stays in memory, and the tokens of all of them (40 bytes each); another one's is read from
the database when it goes on."""


t = schema.trajectories.c

# Made once: to make a statement costs as much as to execute it.
_THIS = and_(t.project == bindparam("its_project"), t.id == bindparam("its_id"))
_LOCK = (
    select(t.state, t.completions, t.sampled_tokens, t.tail_completion_id, t.last_seen_at)
    .where(_THIS)
    .with_for_update()
)
_UPDATE = schema.trajectories.update().where(_THIS)


class CallRows:
    """The rows of calls. Used from one thread, that of the writer."""

    def __init__(self) -> None:
        self._tails: OrderedDict[tuple[str, str], Tail] = OrderedDict()
        self._tail_tokens = 0
        self._erased = Erased()

    def write(self, connection: Connection, calls: Sequence[Call]) -> None:
        """Add calls with all their choices, in one transaction of the caller's. A call that is there already stays; one
        that was to be deleted before it came here is left out."""
        for call in calls:
            if self._erased.has(connection, call):
                continue
            digests = [digest(message) for message in call.messages]
            choices = call.choices or (nothing_said(0),)
            group_id = call.address.group_id
            formed_by = "header"
            if call.threaded_by in ("shadow", "evaluation"):
                formed_by = call.threaded_by
            elif group_id is None and len(choices) > 1:
                group_id, formed_by = f"{call.siblings}.choices", "choices"
            if group_id is not None:
                self._open_group(connection, call, group_id, formed_by)
            retried = _supersede(connection, call)
            for choice in choices:
                self._write_choice(connection, call, choice, digests, group_id, retried.get(choice.index))

    def forget_tails(self) -> None:
        """Drop what is remembered of transactions that did not commit."""
        self._tails.clear()
        self._tail_tokens = 0

    def _open_group(self, connection: Connection, call: Call, group_id: str, formed_by: str) -> None:
        row = {
            "project": call.project,
            "id": group_id,
            "policy": call.policy,
            "formed_by": formed_by,
            "state": "open",
            "size": 0,
            "rewarded": 0,
            "target_size": call.address.group_size,
            "created_at": call.created_at,
        }
        insert_storable(connection, schema.groups, row)

    def _write_choice(
        self,
        connection: Connection,
        call: Call,
        choice: Choice,
        digests: list[bytes],
        group_id: str | None,
        retry_of: str | None,
    ) -> None:
        trajectory_id = call.trajectory_of(choice)
        why_not_trained = call.why_not_trained(choice)
        self._open_trajectory(connection, call, choice, group_id)
        this = {"its_project": call.project, "its_id": trajectory_id}
        # Locked: its turns are numbered one after the other, whoever else writes to it.
        state, turn, sampled, tail_id, seen_at = connection.execute(_LOCK, this).one()
        if state not in ("open", "ended"):
            why_not_trained = why_not_trained or "trajectory_over"
        history = call.history(choice)
        tail = self._tail(connection, call.project, trajectory_id, tail_id)
        new = added(tail, call.messages, digests, call.prompt_token_ids, call.tools)
        row = {
            "project": call.project,
            "id": call.completion_id(choice),
            "upstream_id": call.upstream_id,
            "call_id": call.id,
            "choice": choice.index,
            "trajectory_id": trajectory_id,
            "turn": turn,
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
            "retry_of": retry_of,
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
        # On its id only: a turn that another writer took must be an error, not a record lost in silence.
        if not insert_storable(connection, schema.completions, row, on=["project", "id"]):
            return
        if call.extends is not None and call.status == "complete" and choice.index == 0:
            _continue(connection, call)
        # What broke off after a later call (its retry) had ended is not what it goes on from. Ids sort by time.
        is_tail = call.status == "complete" or tail_id is None or str(row["id"]) > tail_id
        values = {
            "completions": turn + 1,
            "sampled_tokens": sampled + (choice.tokens or 0),
            "last_version": call.policy_version,
            "tail_completion_id": row["id"] if is_tail else tail_id,
            # A slow call that began earlier must not make it look idle.
            "last_seen_at": max(seen_at, call.created_at),
        }
        connection.execute(_UPDATE, this | values)
        if is_tail:
            left = tail_of(str(row["id"]), new.digests, call.prompt_token_ids, choice.token_ids, call.tools)
            self._remember(call.project, trajectory_id, left)

    def _open_trajectory(self, connection: Connection, call: Call, choice: Choice, group_id: str | None) -> None:
        row = {
            "project": call.project,
            "id": call.trajectory_of(choice),
            "group_id": group_id,
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
            "continues": call.continues if choice.index == 0 else call.extends or call.continues,
            "end_user": call.end_user,
        }
        insert_storable(connection, schema.trajectories, row)

    def _remember(self, project: str, trajectory_id: str, tail: Tail | None) -> None:
        key = (project, trajectory_id)
        if (before := self._tails.pop(key, None)) is not None:
            self._tail_tokens -= len(before.token_ids)
        if tail is not None:
            self._tails[key] = tail
            self._tail_tokens += len(tail.token_ids)
        while len(self._tails) > TAILS_KEPT or self._tail_tokens > TAIL_TOKENS_KEPT:
            self._tail_tokens -= len(self._tails.popitem(last=False)[1].token_ids)

    def _tail(self, connection: Connection, project: str, trajectory_id: str, tail_id: str | None) -> Tail | None:
        """The trajectory's tail: from memory where that is still the last one, else read back along `follows`."""
        if tail_id is None:
            return None
        known = self._tails.get((project, trajectory_id))
        if known is not None and known.completion_id == tail_id:
            return known
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


def _supersede(connection: Connection, call: Call) -> dict[int, str]:
    """Mark what `call` asks again as superseded; return its completions' ids by choice, none where it asks afresh.

    A client that lost its answer sends an equal body, and says so by its retry count or by the same turn key. It is
    believed where exactly one call with that body, and that trajectory and turn key where it names them, was not
    answered whole lately: nothing else tells a retry from the next member of a group.
    """
    address, c = call.address, schema.completions.c
    if call.request_digest is None or not (address.retry or address.turn_key):
        return {}
    unanswered = [
        c.project == call.project,
        c.request_digest == call.request_digest,
        c.request_digest.is_not(None),
        c.call_id != call.id,
        c.created_at.between(call.created_at - timedelta(seconds=WINDOW_S), call.created_at),
    ]
    if address.turn_key:
        unanswered.append(c.turn_key == address.turn_key)
    if call.threaded_by == "new":
        unanswered.append(c.threaded_by == "new")
    else:
        sibling = c.trajectory_id.startswith(f"{call.trajectory_id}.", autoescape=True)
        unanswered.append(or_(c.trajectory_id == call.trajectory_id, sibling))
    query = select(c.id, c.call_id, c.choice, c.trajectory_id).where(*unanswered)
    found = list(connection.execute(query))
    if len({row.call_id for row in found}) != 1:
        return {}
    connection.execute(
        schema.completions.update()
        .where(c.project == call.project, c.id.in_([row.id for row in found]))
        .values(why_not_trained=WhyNotTrained.SUPERSEDED.value, request_digest=None)
    )
    for row in found:
        if row.trajectory_id != call.trajectory_id:
            _exclude_if_alone(connection, call.project, row.trajectory_id, row.id)
    return {row.choice: row.id for row in found}


def _continue(connection: Connection, call: Call) -> None:
    """Note that the completion it extends is no longer free to be gone on from."""
    c = schema.completions.c
    extended = (c.project == call.project, c.id == call.extends, c.continued_by.is_(None))
    connection.execute(schema.completions.update().where(*extended).values(continued_by=call.id))


def _exclude_if_alone(connection: Connection, project: str, trajectory_id: str, completion_id: str) -> None:
    """A trajectory with nothing else in it was no attempt: its group goes without it, and is told."""
    c, t = schema.completions.c, schema.trajectories.c
    others = select(c.id).where(c.project == project, c.trajectory_id == trajectory_id, c.id != completion_id)
    undecided = (t.project == project, t.id == trajectory_id, t.state.in_(("open", "ended")))
    connection.execute(
        schema.trajectories.update()
        .where(*undecided, ~others.exists())
        .values(state="excluded", why_not_trained=WhyNotTrained.SUPERSEDED.value, placed_at=None)
    )
