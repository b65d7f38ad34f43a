"""Read and write examples in SQL: the answers that a supervised step imitates, and their token ids.

Ids that the log has are read from it unchanged; only rendered ids are stored. Nothing here writes to trajectories or
groups: an imitated answer may still teach by its reward.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Executable, and_, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ENDED, AnswerText, Example, ExampleSelection, RenderedExample
from trainer.store.examples.sources import USABLE, Source
from trainer.store.step_ends import update_step
from whetstone.config.trainer import BY_EXAMPLE
from whetstone.database.engine import chunks

c, e, f = schema.completions.c, schema.examples.c, schema.feedback.c


def take(
    connection: Connection, claim: Claim, wanted: ExampleSelection, sources: Sequence[Source], now: datetime
) -> None:
    """Assign the sources to the step as its examples, unless it has some already.

    A step on rewards, which has trajectories of its own, says what it imitates beside them.

    Raises:
        LeaseLost: another worker has the step.
    """
    update_step(connection, claim)
    if connection.execute(select(e.source_id).where(*of_step(claim)).limit(1)).first() is not None:
        return
    trajectories = len({one.trajectory_id for one in sources})
    if claim.kind in BY_EXAMPLE:
        update_step(connection, claim, trajectories=trajectories)
    else:
        imitates = {"from": wanted.source, "min_reward": wanted.min_reward, "limit": wanted.limit}
        update_step(connection, claim, imitates=imitates | {"trajectories": trajectories})
    known: set[str] = set()
    for some in chunks([one.source_id for one in sources]):
        there = and_(e.project == claim.project, e.policy == claim.policy, e.source_id.in_(some))
        known.update(connection.execute(select(e.source_id).where(there)).scalars())
        connection.execute(schema.examples.update().where(there, USABLE).values(step=claim.number, left_out=None))
    new = [
        {
            "project": claim.project,
            "policy": claim.policy,
            "source_id": one.source_id,
            "source": wanted.source,
            "trajectory_id": one.trajectory_id,
            "completion_id": one.completion_id,
            "step": claim.number,
            "created_at": now,
        }
        for one in sources
        if one.source_id not in known
    ]
    if new:
        connection.execute(schema.examples.insert(), new)


def read_examples(connection: Connection, claim: Claim) -> list[Example]:
    """Return the step's examples, by trajectory and turn."""
    columns = (e.source_id, e.trajectory_id, e.completion_id, e.left_out, f.demonstration)
    query = (
        select(*columns, e.prompt_token_ids, e.token_ids)
        .join(schema.completions, and_(c.project == e.project, c.id == e.completion_id))
        .join(schema.feedback, and_(f.project == e.project, f.id == e.source_id), isouter=True)
        .where(*of_step(claim))
        .order_by(e.trajectory_id, c.turn, e.source_id)
    )
    examples = []
    log: dict[str, Any] = {}
    at = None
    for row in connection.execute(query).all():
        if row.left_out is not None:
            examples.append(Example(row.source_id, row.trajectory_id, left_out=row.left_out))
            continue
        if at != row.trajectory_id:
            at, log = row.trajectory_id, read_log(connection, claim.project, row.trajectory_id)
        examples.append(_example(row, chain_of(log, row.completion_id)))
    return examples


def write_rendered(connection: Connection, claim: Claim, done: Iterable[RenderedExample]) -> None:
    """Store what was rendered, or why it cannot be.

    Raises:
        LeaseLost: another worker has the step.
    """
    update_step(connection, claim)
    for one in done:
        connection.execute(
            schema.examples.update()
            .where(e.project == claim.project, e.policy == claim.policy, e.source_id == one.source_id)
            .values(left_out=one.left_out, **_ids_of(one))
        )


def _ids_of(one: RenderedExample) -> dict[str, list[int]]:
    """Return the columns of its rendered ids.

    Ids from an earlier rendering stay, also where the example is left out now.
    """
    ids = {"prompt_token_ids": one.prompt_ids, "token_ids": one.token_ids}
    return {name: list(token_ids) for name, token_ids in ids.items() if token_ids is not None}


def of_step(claim: Claim) -> tuple[ColumnElement[bool], ...]:
    return (e.project == claim.project, e.policy == claim.policy, e.step == claim.number)


def read_log(connection: Connection, project: str, trajectory_id: str) -> dict[str, Any]:
    """Return a trajectory's completions, by id."""
    columns = (c.id, c.follows, c.endpoint, c.new_messages, c.tools, c.response, c.sampling, c.finish_reason)
    query = select(*columns, c.prompt_token_ids, c.token_ids)
    rows = connection.execute(query.where(c.project == project, c.trajectory_id == trajectory_id))
    return {row.id: row for row in rows}


def chain_of(log: Mapping[str, Any], completion_id: str) -> list[Any]:
    """Return the completion and those it extends, the first one first."""
    chain = []
    at: str | None = completion_id
    while at is not None:
        chain.append(log[at])
        at = log[at].follows
    return chain[::-1]


def with_chains(connection: Connection, claim: Claim, query: Executable) -> Iterator[tuple[Any, list[Any]]]:
    """Return the rows of a query, which come by trajectory, each with the completion it names and those it extends."""
    log: dict[str, Any] = {}
    at = None
    for row in connection.execute(query).all():
        if at != row.trajectory_id:
            at, log = row.trajectory_id, read_log(connection, claim.project, row.trajectory_id)
        yield row, chain_of(log, row.completion_id)


def _example(row: Any, chain: Sequence[Any]) -> Example:
    last = chain[-1]
    shown = row.demonstration is not None
    prompt_ids = _ids(row.prompt_token_ids) or prompt_of(chain)
    token_ids = _ids(row.token_ids)
    if token_ids is None and not shown and prompt_ids is not None:
        token_ids = _ids(last.token_ids)
    text = None
    if prompt_ids is None or token_ids is None:
        text = AnswerText(
            endpoint=last.endpoint,
            messages=messages_of(chain),
            tools=next((one.tools for one in reversed(chain) if one.tools is not None), None),
            template_arguments=(last.sampling or {}).get("chat_template_kwargs"),
            answer=row.demonstration if shown else last.response,
            whole=shown or last.finish_reason in ENDED,
        )
    return Example(row.source_id, row.trajectory_id, prompt_ids, token_ids, text)


def prompt_of(chain: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the whole prompt of the last one, as logged."""
    ids: list[int] = []
    for one in chain[:-1]:
        ids += [*(one.prompt_token_ids or ()), *(one.token_ids or ())]
    added = chain[-1].prompt_token_ids
    return (*ids, *added) if added else None


def messages_of(chain: Sequence[Any]) -> list[Any]:
    """Return the whole conversation that the last one answered."""
    messages: list[Any] = []
    for one in chain[:-1]:
        messages += [*(one.new_messages or ()), one.response]
    return messages + (chain[-1].new_messages or [])


def _ids(stored: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if stored is None else tuple(stored)
