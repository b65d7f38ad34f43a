"""Read, without a gradient, what the loss of an update depends on as a whole, before its first backward pass.

Each process of a step reads a part of the rows, and all have the results of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import torch

from trainer.domain.rows import Answer, Row, rows_for_sft
from trainer.learner.forward import Reading
from trainer.learner.gradient import memory
from trainer.learner.gradient.divergence import Targets
from trainer.learner.micro_batches import MicroBatch
from trainer.learner.processes.collective import Collective, Value
from whetstone.config.trainer import TrainerSettings


def row_logprobs(reading: Reading, peers: Collective, rows: Sequence[Row]) -> list[float]:
    """Return the sum of the log probabilities, in nats, of each row's sampled tokens."""

    def sums(batch: MicroBatch, count: int) -> list[float]:
        logprobs_S = reading.read(batch).logprobs_S.double()
        return list(logprobs_S.new_zeros(count).index_add(0, batch.sequences_S, logprobs_S).tolist())

    return _of_rows(reading, peers, rows, sums)


def targets(reading: Reading, peers: Collective, rows: Sequence[Row], settings: TrainerSettings) -> list[Targets]:
    """Return the model's likeliest tokens at each token of the rows' answers, after the teacher's prompts."""
    answers = [Answer("", row.teacher_ids, tuple(compress(row.token_ids_T, row.sampled_T))) for row in rows]
    warmth, count = settings.hindsight_temperature, settings.hindsight_top
    taught = [
        replace(row, temperatures_T=tuple(warmth if sampled else 1.0 for sampled in row.sampled_T))
        for answer in answers
        for row in rows_for_sft("", [answer])
    ]

    def likeliest(batch: MicroBatch, rows_there: int) -> list[Targets]:
        lengths = batch.sequences_S.bincount(minlength=rows_there).tolist()
        ids, logprobs = (tensor.cpu().split(lengths) for tensor in reading.likeliest(batch, count))
        return [Targets(*pair) for pair in zip(ids, logprobs, strict=True)]

    return _of_rows(reading, peers, taught, likeliest)


@torch.no_grad()
def _of_rows(
    reading: Reading, peers: Collective, rows: Sequence[Row], read: Callable[[MicroBatch, int], list[Value]]
) -> list[Value]:
    """Return what `read` gives for the rows of each micro-batch, in the order of `rows`."""
    mine = range(peers.rank, len(rows), peers.size)
    own = [rows[place] for place in mine]

    def act() -> dict[int, Value]:
        values: dict[int, Value] = {}
        plan = reading.plan(own) if own else []
        for places in [*plan, *[[]] * (reading.lockstep.most(len(plan)) - len(plan))]:
            batch = reading.batch([own[place] for place in places], [1.0] * len(places)) if places else None
            reading.lockstep.anyone(True)
            if batch is None:
                reading.accompany()
            else:
                values |= zip([mine[place] for place in places], read(batch, len(places)), strict=True)
        return values

    # All processes of a sharded base make the same passes, so none repeats its own with fewer tokens.
    values = act() if reading.lockstep.is_sharded else memory.within(reading.budget, act)
    together: dict[int, Value] = {}
    for some in peers.exchange(values):
        together |= some
    return [together[place] for place in range(len(rows))]
