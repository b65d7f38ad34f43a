"""Read and write held-out prompts in SQL: which exist, which versions answer them, and the rewards of the answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, select

from migrations import schema
from trainer.domain.claims import GateStep
from whetstone.domain.ids import new_id

OLDEST_READ = 20
"""This many eval trajectories are read for each prompt that is needed: the same prompt may occur many times."""
TEST_OVER = "the test was over"

g, t, c, e = schema.groups.c, schema.trajectories.c, schema.completions.c, schema.evaluations.c


@dataclass(frozen=True)
class Pair:
    """The rewards of the candidate and its parent for one held-out prompt; None: no reward."""

    candidate: float | None
    parent: float | None
    waits: bool
    """An answer or a reward may still arrive."""


def read_prompts(connection: Connection, project: str, policy: str, most: int) -> list[str]:
    """Return the newest distinct first prompts of the eval split, as ids of their completions.

    Only chats in text, and no prompts that a gate itself has sent.
    """
    first = and_(c.project == t.project, c.trajectory_id == t.id, c.turn == 0)
    query = (
        select(t.prompt_hash, c.id, c.new_messages)
        .join(schema.completions, first)
        .where(t.project == project, t.policy == policy, t.split == "eval", t.prompt_hash.is_not(None))
        .where(c.policy == policy, c.endpoint == "chat.completions", c.status == "complete")
        .where(c.threaded_by != "evaluation")
        .order_by(t.created_at.desc(), t.id)
        .limit(OLDEST_READ * most)
    )
    by_prompt: dict[str, str] = {}
    for prompt_hash, completion_id, messages in connection.execute(query):
        if len(by_prompt) < most and prompt_hash not in by_prompt and _is_text(messages):
            by_prompt[prompt_hash] = completion_id
    return list(by_prompt.values())


def ask(connection: Connection, tested: GateStep, source_id: str) -> None:
    """Request answers to a prompt from the candidate and its parent; the proxy generates them."""
    row = {
        "project": tested.project,
        "policy": tested.policy,
        "candidate": tested.version_out,
        "source_id": source_id,
        "group_id": f"evaluation.{new_id()}",
    }
    versions = (tested.version_out, tested.version_in)
    rows = [{**row, "trajectory_id": new_id(), "version": version} for version in versions]
    connection.execute(schema.evaluations.insert(), rows)


def ask_no_more(connection: Connection, tested: GateStep) -> None:
    """Cancel the answers that have not been generated yet."""
    due = (e.project == tested.project, e.policy == tested.policy, e.candidate == tested.version_out)
    left = schema.evaluations.update().where(*due, e.drawn_at.is_(None), e.error.is_(None))
    connection.execute(left.values(error=TEST_OVER))


def read_pairs(connection: Connection, tested: GateStep) -> list[Pair]:
    """Return the results of the answers so far, prompt by prompt."""
    drawn = and_(t.project == e.project, t.id == e.trajectory_id)
    group = and_(g.project == e.project, g.id == e.group_id)
    answers = schema.evaluations.outerjoin(schema.trajectories, drawn).outerjoin(schema.groups, group)
    # Judges may still rank it while its group is closed, and functions run after that.
    judged = and_(g.state.not_in(("open", "closed")), t.state != "open", t.code_due_at.is_(None))
    query = (
        select(e.source_id, e.version, t.reward, e.error.is_not(None).label("lost"), judged.label("over"))
        .select_from(answers)
        .where(e.project == tested.project, e.policy == tested.policy, e.candidate == tested.version_out)
        .order_by(e.source_id)
    )
    prompts: dict[str, dict[int, Any]] = {}
    for row in connection.execute(query):
        prompts.setdefault(row.source_id, {})[row.version] = row
    return [_pair(of_prompt, tested) for of_prompt in prompts.values()]


def _pair(answers: Mapping[int, Any], tested: GateStep) -> Pair:
    both = candidate, parent = answers[tested.version_out], answers[tested.version_in]
    # Where one answer is lost, there is nothing to compare the other with.
    waits = not any(one.lost for one in both) and not all(one.over for one in both)
    return Pair(candidate.reward, parent.reward, waits)


def _is_text(messages: Any) -> bool:
    """Return whether a conversation consists of text only: media that it refers to may no longer exist."""
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return bool(contents) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
