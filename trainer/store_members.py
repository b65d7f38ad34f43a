"""The trainer's SQL of members: what a step's trajectories said, or why nothing of it can be trained on. Reads only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, select

from migrations import schema
from trainer.claims import Claim, Member, why_silent
from trainer.rows import Spoken


@dataclass(frozen=True, slots=True)
class _Said:
    """A trajectory's completions, as far as its step can use them; fields as Member has them."""

    spoken: tuple[Spoken, ...]
    silent: str | None
    seed: tuple[int, int] | None


def read_members(connection: Connection, claim: Claim) -> list[Member]:
    """The step's trajectories with whole prompts, in a fixed order."""
    s, g = schema.step_trajectories.c, schema.groups.c
    query = (
        select(s.trajectory_id, s.group_id, s.reward, s.baseline, g.compared_with)
        .join(schema.groups, and_(g.project == s.project, g.id == s.group_id))
        .where(s.project == claim.project, s.step_id == claim.id)
        .order_by(s.group_id, s.trajectory_id)
    )
    members = []
    for row in connection.execute(query).all():
        said = _said(connection.execute(_completions(claim, row.trajectory_id)), claim.policy)
        members.append(
            Member(
                trajectory_id=row.trajectory_id,
                group_id=row.group_id,
                reward=row.reward,
                spoken=said.spoken,
                silent=said.silent,
                seed=said.seed,
                alone=row.compared_with == "baseline",
                baseline=row.baseline,
            )
        )
    return members


def _completions(claim: Claim, trajectory_id: str) -> Any:
    c = schema.completions.c
    columns = (c.id, c.follows, c.choice, c.policy, c.policy_version, c.prompt_token_ids, c.token_ids)
    return (
        select(*columns, c.inference_logprobs, c.sampling, c.why_not_trained)
        .where(c.project == claim.project, c.trajectory_id == trajectory_id)
        .order_by(c.turn)
    )


def _said(completions: Iterable[Any], policy: str) -> _Said:
    """Completions in turn order; one that cannot be trained on still carries those that follow it."""
    whole: dict[str, tuple[int, ...]] = {}
    spoken: list[Spoken] = []
    reasons: list[tuple[str, str | None]] = []
    seed: tuple[int, int] | None = None
    for row in completions:
        if row.prompt_token_ids is not None and row.token_ids is not None:
            prompt_ids = (*whole.get(row.follows, ()), *row.prompt_token_ids)
            whole[row.id] = (*prompt_ids, *row.token_ids)
            if row.why_not_trained is None and row.policy == policy:
                if not spoken:
                    seed = _seed(row)
                spoken.append(_spoken(row, prompt_ids))
                continue
        reasons.append((row.policy, row.why_not_trained))
    return _Said(tuple(spoken), None if spoken else why_silent(policy, reasons), seed)


def _spoken(row: Any, prompt_ids: tuple[int, ...]) -> Spoken:
    temperature = (row.sampling or {}).get("temperature")
    return Spoken(
        completion_id=row.id,
        prompt_ids=prompt_ids,
        token_ids=tuple(row.token_ids),
        logprobs=tuple(row.inference_logprobs),
        version=row.policy_version,
        temperature=1.0 if temperature is None else float(temperature),
    )


def _seed(row: Any) -> tuple[int, int] | None:
    seed = (row.sampling or {}).get("seed")
    return None if seed is None else (seed, row.choice)
