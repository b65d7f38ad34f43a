"""The optimizer updates of a step: which rows each takes, with which learning rate, and all of them or none."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from trainer.domain.rows import Row
from whetstone.config.trainer import Kind, TrainerSettings

FLOOR = 0.1
"""Share of the learning rate that is left after `decay_updates`, as in most published recipes: a policy whose traffic
goes on must still be able to follow it.
"""

KIND = "supervised"
"""Key of a weight's state: the number of the kind of step that its moments are of. Absent in states of early releases,
and where there are none. The name is of the time when there were two kinds."""
NUMBERS: dict[Kind, int] = {"grpo": 0, "sft": 1, "kto": 2, "dpo": 3, "hindsight": 4, "distill": 5, "prefer": 3}
"""Steps of equal number share their moments: they follow the same loss."""


def parts(rows: Sequence[Row], count: int) -> list[list[Row]]:
    """Return the rows in up to `count` parts, of about as many sampled tokens each, for one update each.

    Rows keep their order, in which those of a group are together; those of a trajectory or a pair are never divided.
    """
    total = sum(sum(row.sampled_T) for row in rows)
    divided: list[list[Row]] = [[] for _ in range(count)]
    before = 0
    for _, own in groupby(rows, key=lambda row: row.pair or row.trajectory_id):
        together = list(own)
        divided[min(count - 1, before * count // total)] += together
        before += sum(sum(row.sampled_T) for row in together)
    return [part for part in divided if part]


def of_step(rows: Sequence[Row], kind: Kind, settings: TrainerSettings) -> list[list[Row]]:
    """Return the rows of each update of a step, in order.

    A supervised step may take several epochs, each in an order of its own, and updates of so many rows; see `parts` for
    the others. Rows of past attempts are divided by themselves, and each part goes into one update.
    """
    if kind != "sft":
        divided = parts([row for row in rows if not row.replayed], settings.updates_per_step)
        past = parts([row for row in rows if row.replayed], len(divided))
        return [own + (past[place] if place < len(past) else []) for place, own in enumerate(divided)]
    size = settings.sft_rows_per_update
    count = settings.updates_per_step if size is None else math.ceil(len(rows) / size)
    epochs = [list(rows)]
    for epoch in range(1, settings.sft_epochs):
        trajectories = [list(own) for _, own in groupby(rows, key=lambda row: row.trajectory_id)]
        random.Random(epoch).shuffle(trajectories)
        epochs.append([row for own in trajectories for row in own])
    return [part for epoch in epochs for part in parts(epoch, count)]


def learning_rate(settings: TrainerSettings, learning_rate: float, kind: Kind, updates: int) -> float:
    """Return AdamW's learning rate after so many updates of a policy by steps of this kind.

        warm-up   rate · (n + 1) / warmup_updates                              n < warmup_updates
        decay     rate · (f + (1 - f) · (1 + cos(π · x)) / 2), f = FLOOR       x = share of decay_updates, at most 1

    `learning_rate` is the one of policy gradients where none is set. The decay is SGDR's (arXiv 1608.03983), once.
    """
    rate = (settings.sft_learning_rate if kind == "sft" else None) or learning_rate
    if updates < settings.warmup_updates:
        return rate * (updates + 1) / settings.warmup_updates
    if settings.decay_updates is None:
        return rate
    done = min(1.0, (updates - settings.warmup_updates) / settings.decay_updates)
    return rate * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2)


def take(optimizer: torch.optim.Optimizer, kind: Kind) -> None:
    """Run the optimizer, with moments of this kind of step alone: those of another kind are dropped.

    Supervised and policy gradients differ in size, and so do those of preferences. AdamW divides by the root of their
    mean square, which remembers thousands of updates: after supervised steps it would divide small policy gradients by
    large supervised ones.
    """
    for state in optimizer.state.values():
        if not _is_of(kind, state):
            state.clear()
    optimizer.step()
    for state in optimizer.state.values():
        state[KIND] = torch.tensor(NUMBERS[kind])


def updates_of(optimizer: torch.optim.Optimizer, kind: Kind) -> int:
    """Return how many updates the optimizer's moments of this kind are of; 0 where it has none."""
    own = (state for state in optimizer.state.values() if "step" in state and _is_of(kind, state))
    return max((int(state["step"]) for state in own), default=0)


def _is_of(kind: Kind, state: dict[str, Any]) -> bool:
    return KIND not in state or int(state[KIND]) == NUMBERS[kind]


@contextmanager
def all_or_none(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set the optimizer and its weights back where anything raises inside the context."""
    weights: list[Tensor] = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [(weight.detach().clone(), _copied(optimizer.state.get(weight))) for weight in weights]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for weight, (value, state) in zip(weights, before, strict=True):
                weight.copy_(value)
                if state is None:
                    optimizer.state.pop(weight, None)
                else:
                    optimizer.state[weight] = state
        raise


def _copied(state: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if state is None else {name: value.clone() for name, value in state.items()}
