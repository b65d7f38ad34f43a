"""Check which version sampled the completions of `swaps`: SQL's records and planted mixes, each computed again."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, select

from benchmarks.swaps.adapters import Sets
from benchmarks.swaps.figures import fits, gaps
from migrations import schema
from whetstone.config.settings import Settings
from whetstone.vllm.client import Vllm

ANSWER_TOKENS = 32
SHORTEST_PART = 8
"""Fewest tokens of each part of a planted mix; a sampled part that ends earlier is drawn again."""


@dataclass(frozen=True)
class RecordedCompletion:
    """A completion, and its recorded version."""

    name: str
    version: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of computing completions again."""

    completions: int
    tokens: int
    worst_gap: float
    """Largest mean |Δ| of a half, among those that fit; nats."""
    misfits: tuple[str, ...]
    """Completions that do not match their version, each with the difference of its halves in nats."""


def recorded(engine: Engine, settings: Settings) -> list[RecordedCompletion]:
    """Return every completion in SQL that has tokens, with its whole prompt, in the order of their requests.

    Raises:
        ValueError: a prompt's length differs from vLLM's count, so nothing can be computed from it.
    """
    c = schema.completions.c
    query = select(
        c.id, c.follows, c.policy_version, c.prompt_token_ids, c.token_ids, c.inference_logprobs, c.prompt_tokens
    )
    with engine.connect() as connection:
        rows = connection.execute(query.where(c.project == settings.project).order_by(c.created_at, c.turn)).all()
    whole: dict[str, tuple[int, ...]] = {}
    completions = []
    for row in rows:
        if not row.token_ids:
            continue
        prompt_ids = (*whole.get(row.follows, ()), *row.prompt_token_ids)
        if row.prompt_tokens is not None and len(prompt_ids) != row.prompt_tokens:
            raise ValueError(
                f"the prompt of {row.id} has {len(prompt_ids)} tokens in SQL and {row.prompt_tokens} in vLLM"
            )
        whole[row.id] = (*prompt_ids, *row.token_ids)
        logprobs = tuple(row.inference_logprobs or ())
        completions.append(RecordedCompletion(row.id, row.policy_version, prompt_ids, tuple(row.token_ids), logprobs))
    return completions


def judge(recorded_completions: Iterable[RecordedCompletion], sets: Sets) -> Verdict:
    """Compute each completion again with its version."""
    completions, worst, misfits = list(recorded_completions), 0.0, []
    for completion in completions:
        computed = sets.logprobs(sets.speaker(completion.version), completion.prompt_ids, completion.token_ids)
        first, second = gaps(completion.logprobs, computed)
        if fits(completion.logprobs, computed):
            worst = max(worst, first, second)
        else:
            misfits.append(
                f"{completion.name}: {len(completion.token_ids)} tokens, off by {first:.3f} and {second:.3f} nats"
            )
    tokens = sum(len(completion.token_ids) for completion in completions)
    return Verdict(len(completions), tokens, worst, tuple(misfits))


def mixes(
    control: Vllm, names: Sequence[str], prompts: Sequence[Sequence[int]], count: int
) -> list[list[RecordedCompletion]]:
    """Return completions of two versions, begun by one and ended by the other, really sampled that way.

    They switch after a half or after three quarters, in turn. Each gives two records: as if the first had sampled
    all tokens, and as if the second had. `names` are the names of the versions on the server.
    """
    planted: list[list[RecordedCompletion]] = []
    pairs = list(itertools.permutations(range(len(names)), 2))
    draws = 0
    while len(planted) < count:
        first, second = pairs[draws % len(pairs)]
        prompt = list(prompts[draws % len(prompts)])
        begun_tokens = (ANSWER_TOKENS // 2, ANSWER_TOKENS * 3 // 4)[len(planted) % 2]
        draws += 1
        begun = control.sample(names[first], prompt, begun_tokens, seed=draws)
        ended = control.sample(names[second], [*prompt, *begun.token_ids], ANSWER_TOKENS - begun_tokens, seed=draws)
        if min(len(begun.token_ids), len(ended.token_ids)) < SHORTEST_PART:
            continue
        token_ids, logprobs = (*begun.token_ids, *ended.token_ids), (*begun.logprobs, *ended.logprobs)
        label = f"mix of {names[first]} and {names[second]}"
        planted.append([RecordedCompletion(label, who, tuple(prompt), token_ids, logprobs) for who in (first, second)])
    return planted


def unmixed(
    control: Vllm, names: Sequence[str], prompts: Sequence[Sequence[int]], count: int
) -> list[RecordedCompletion]:
    """Return as many completions of one version each, sampled in the same way."""
    completions = []
    for number in range(count):
        speaker, prompt = number % len(names), prompts[number % len(prompts)]
        sampled = control.sample(names[speaker], prompt, ANSWER_TOKENS, seed=number)
        token_ids, logprobs = tuple(sampled.token_ids), tuple(sampled.logprobs)
        completions.append(RecordedCompletion(f"all by {names[speaker]}", speaker, tuple(prompt), token_ids, logprobs))
    return completions
