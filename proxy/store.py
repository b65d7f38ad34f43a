"""The proxy's SQL: calls and feedback in, policies and states out. The only file of the proxy that knows the tables."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Table, and_, func, or_, select

from migrations import schema
from migrations.database import insert_new
from proxy.call import Call, Choice, nothing_said
from proxy.delta import ANSWER, Tail, added, digest, tail_of
from proxy.policies import Policy
from proxy.repeats import WINDOW_S
from whetstone.reasons import WhyNotTrained

TAILS_KEPT = 4096
TAIL_TOKENS_KEPT = 8_000_000
"""Trajectories whose tail stays in memory, and the tokens of all of them (40 bytes each); another one's is read from
the database when it goes on."""

NUMBERS = frozenset({"prompt_token_ids", "token_ids", "inference_logprobs"})
"""Columns that hold numbers only: long, and nothing in them to make storable."""


class Store:
    """The tables, through one engine. Writes from one thread, reads from any."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._tails: OrderedDict[tuple[str, str], Tail] = OrderedDict()
        self._tail_tokens = 0

    def policies(self, project: str) -> list[Policy]:
        """The project's policies with the versions vLLM keeps loaded, in the order of their names."""
        p, v = schema.policies.c, schema.policy_versions.c
        query = (
            select(p.id, p.live_version, p.created_at, p.aliases, p.upstream, p.base_model, v.version)
            .join(
                schema.policy_versions,
                and_(v.project == p.project, v.policy == p.id, v.served),
                isouter=True,
            )
            .where(p.project == project)
            .order_by(p.id)
        )
        with self._reader.connect() as connection:
            rows = list(connection.execute(query))
        return [_policy(list(of_policy)) for _, of_policy in groupby(rows, key=lambda row: row.id)]

    def reply(self, project: str, turn_key: str) -> bytes | None:
        """The answer that was sent under this key; None where none was finished."""
        c = schema.completions.c
        kept = (c.project == project, c.turn_key == turn_key, c.turn_key.is_not(None), c.reply.is_not(None))
        with self._reader.connect() as connection:
            found: bytes | None = connection.execute(select(c.reply).where(*kept).limit(1)).scalar()
        return found

    def write_calls(self, connection: Connection, calls: Sequence[Call]) -> None:
        """Add calls with all their choices, in one transaction of the caller's. A call that is there already stays."""
        for call in calls:
            digests = [digest(message) for message in call.messages]
            choices = call.choices or (nothing_said(0),)
            group_id = call.address.group_id
            formed_by = "header"
            if call.threaded_by == "shadow":
                formed_by = "shadow"
            elif group_id is None and len(choices) > 1:
                group_id, formed_by = f"{call.trajectory_of(choices[0])}.choices", "choices"
            if group_id is not None:
                self._open_group(connection, call, group_id, formed_by)
            retried = _supersede(connection, call)
            for choice in choices:
                self._write_choice(connection, call, choice, digests, group_id, retried.get(choice.index))

    def insert_feedback(self, connection: Connection, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Add feedback as it came, state `waiting`; return the ids, those of the first where a key repeats."""
        keyless = [{**_storable(row), "state": "waiting"} for row in rows if row["idempotency_key"] is None]
        if keyless:
            connection.execute(schema.feedback.insert(), keyless)
        ids = []
        for row in rows:
            new = row["idempotency_key"] is None or _insert_new(
                connection, schema.feedback, {**row, "state": "waiting"}
            )
            ids.append(row["id"] if new else self._feedback_by_key(connection, row))
        return ids

    def withdraw_feedback(self, connection: Connection, project: str, feedback_id: str, now: datetime) -> None:
        """Note that an app takes feedback back, unless a step has claimed what it speaks of. What is over stays."""
        f, t, g = schema.feedback.c, schema.trajectories.c, schema.groups.c
        claimed = ("claimed", "trained")
        its_trajectory = (t.project == f.project, t.id == f.trajectory_id, t.state.in_(claimed))
        its_group = (g.project == f.project, g.id == f.target_id, g.state.in_(claimed))
        connection.execute(
            schema.feedback.update()
            .where(f.project == project, f.id == feedback_id, f.withdrawn_at.is_(None))
            .where(f.state.in_(("waiting", "applied", "superseded")))
            .where(~select(t.id).where(*its_trajectory).exists())
            .where(or_(f.target_kind != "group", f.applied_at.is_(None), ~select(g.id).where(*its_group).exists()))
            .values(withdrawn_at=now)
        )

    def feedback(self, project: str, feedback_id: str) -> dict[str, Any] | None:
        """One feedback as it stands; None where the project has none of that id.

        Of one that is applied `why_not_trained` tells what its trajectory still waits for.
        """
        row = self._row(schema.feedback, project, feedback_id)
        if row is not None:
            applied = row["state"] == "applied" and row["trajectory_id"] is not None
            trajectory = self.trajectory(project, row["trajectory_id"]) if applied else None
            row["why_not_trained"] = trajectory and trajectory["why_not_trained"]
        return row

    def trajectory(self, project: str, trajectory_id: str) -> dict[str, Any] | None:
        """One trajectory as it stands. What waits for a step of a policy that does not train says so."""
        row = self._row(schema.trajectories, project, trajectory_id)
        if row is not None and row["why_not_trained"] == WhyNotTrained.WAITING_STEP:
            policy = self._row(schema.policies, project, row["policy"])
            if policy is not None and policy["state"] != "training":
                row["why_not_trained"] = WhyNotTrained.POLICY_NOT_TRAINING.value
        return row

    def group(self, project: str, group_id: str) -> dict[str, Any] | None:
        """One group as it stands."""
        return self._row(schema.groups, project, group_id)

    def group_members(self, project: str, group_id: str) -> list[dict[str, Any]]:
        """Its trajectories: id, state, reward, why_not_trained."""
        t = schema.trajectories.c
        query = (
            select(t.id, t.state, t.reward, t.why_not_trained)
            .where(t.project == project, t.group_id == group_id)
            .order_by(t.created_at, t.id)
        )
        with self._reader.connect() as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

    def reasons(self, project: str, since: datetime) -> dict[tuple[str, str], int]:
        """Trajectories that began since then, by policy and reason ("" once trained on); a name behind one is cut."""
        t = schema.trajectories.c
        query = (
            select(t.policy, t.why_not_trained, func.count())
            .where(t.project == project, t.created_at >= since)
            .group_by(t.policy, t.why_not_trained)
        )
        counts: dict[tuple[str, str], int] = {}
        with self._reader.connect() as connection:
            for policy, reason, count in connection.execute(query):
                labels = (policy, (reason or "").partition(":")[0])
                counts[labels] = counts.get(labels, 0) + count
        return counts

    def probe_tokens(self, project: str) -> int:
        """Tokens that were sampled so far to probe versions, and whether vLLM lives."""
        v = schema.policy_versions.c
        query = select(func.sum(v.probe_tokens)).where(v.project == project)
        with self._reader.connect() as connection:
            return int(connection.execute(query).scalar() or 0)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def forget_tails(self) -> None:
        """Drop what is remembered of transactions that did not commit."""
        self._tails.clear()
        self._tail_tokens = 0

    def _row(self, table: Table, project: str, row_id: str) -> dict[str, Any] | None:
        query = select(table).where(table.c.project == project, table.c.id == row_id)
        with self._reader.connect() as connection:
            row = connection.execute(query).one_or_none()
        return dict(row._mapping) if row else None

    def _feedback_by_key(self, connection: Connection, row: Mapping[str, Any]) -> str:
        f = schema.feedback.c
        query = select(f.id).where(f.project == row["project"], f.idempotency_key == row["idempotency_key"])
        return str(connection.execute(query).scalar_one())

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
        _insert_new(connection, schema.groups, row)

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
        t = schema.trajectories.c
        is_trajectory = and_(t.project == call.project, t.id == trajectory_id)
        columns = (t.state, t.completions, t.sampled_tokens, t.tail_completion_id)
        # Locked: its turns are numbered one after the other, whoever else writes to it.
        found = connection.execute(select(*columns).where(is_trajectory).with_for_update())
        state, turn, sampled, tail_id = found.one()
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
            "completion_tokens": None if choice.token_ids is None else len(choice.token_ids),
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
        }
        # On its id only: a turn that another writer took must be an error, not a record lost in silence.
        if not _insert_new(connection, schema.completions, row, on=["project", "id"]):
            return
        if call.extends is not None and call.status == "complete" and choice.index == 0:
            _continue(connection, call)
        connection.execute(
            schema.trajectories.update()
            .where(is_trajectory)
            .values(
                completions=turn + 1,
                sampled_tokens=sampled + len(choice.token_ids or ()),
                last_version=call.policy_version,
                tail_completion_id=row["id"],
                last_seen_at=call.created_at,
            )
        )
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
        _insert_new(connection, schema.trajectories, row)

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
        c = schema.completions.c
        chain: list[Any] = []
        follows: str | None = tail_id
        while follows is not None:
            columns = (c.follows, c.new_messages, c.tools, c.response, c.prompt_token_ids, c.token_ids)
            row = connection.execute(select(*columns).where(c.project == project, c.id == follows)).one()
            chain.append(row)
            follows = row.follows
        token_ids: list[int] = []
        digests: list[bytes] = []
        tools = None
        for row in reversed(chain):
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


def _policy(rows: list[Any]) -> Policy:
    """A policy from its rows, one for each version it has."""
    first = rows[0]
    return Policy(
        name=first.id,
        live_version=first.live_version,
        served_versions=frozenset(row.version for row in rows if row.version is not None),
        created_at_s=int(first.created_at.timestamp()),
        aliases=tuple(first.aliases or ()),
        upstream=first.upstream,
        upstream_model=first.base_model if first.upstream else None,
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


def _insert_new(connection: Connection, table: Table, row: Mapping[str, Any], on: list[str] | None = None) -> bool:
    """`insert_new`, of what both databases can hold."""
    storable = {column: value if column in NUMBERS else _storable(value) for column, value in row.items()}
    return insert_new(connection, table, storable, on)


def _storable(value: Any) -> Any:
    """The value with U+FFFD for NUL, which PostgreSQL's texts cannot hold. Token ids keep what was said."""
    match value:
        case str():
            return value.replace("\x00", "\ufffd")
        case list() | dict() if b"\\u0000" not in msgspec.json.encode(value):
            return value  # nearly all; walked, they could be nested no deeper than Python's stack
        case list():
            return [_storable(item) for item in value]
        case dict():
            return {_storable(key): _storable(item) for key, item in value.items()}
    return value
