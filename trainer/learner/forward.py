"""Run the forward pass of one model: micro-batches in, log probabilities out."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from trainer.domain.rows import Row
from trainer.learner import attention, self_checks
from trainer.learner import prefix_trees as trees
from trainer.learner.base.model_files import ends_of
from trainer.learner.chunked_head import chosen_logprobs, likeliest, token_logprobs
from trainer.learner.constrained import head as constrained_head
from trainer.learner.gradient.memory import TokenBudget, ran_out
from trainer.learner.micro_batches import MicroBatch, by_length
from trainer.learner.sharded.lockstep import COMPANY, Free
from trainer.learner.sharded.units import reset, through_head
from whetstone.config.trainer import TrainerSettings

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Read:
    """The model's figures for the S sampled tokens of a micro-batch, in nats."""

    logprobs_S: Tensor
    entropies_S: Tensor
    chosen_SK: Tensor | None = None
    """Log probabilities of other tokens that were chosen at each position."""
    tool_logprobs_E: Tensor | None = None
    """Of the tokens that tools gave, at temperature 1, where they were wanted and there are any."""


@dataclass(slots=True)
class Proofs:
    """What the self-checks proved of a base model, so that its next learner need not prove it again."""

    ways: list[attention.Way] | None = None
    """Ways in which it reads forests; None until they were tried."""


class Reading:
    """One model's forward pass over rows: as forests if the self-checks prove that it can, else side by side."""

    def __init__(
        self,
        model: PeftModel,
        settings: TrainerSettings,
        budget: TokenBudget,
        proofs: Proofs | None = None,
        lockstep: Free | None = None,
    ) -> None:
        """Prove that our forward pass computes what the model's own does, unless `proofs` of its base model say so.

        `lockstep`: how passes wait for those of other processes; by default they do not.

        Raises:
            ModelUnusable: it does not.
        """
        causal: PreTrainedModel = model.get_base_model()
        self._settings = settings
        self.budget = budget
        self.lockstep = lockstep or Free()
        self._device: torch.device = model.device
        self._decoder: Any = causal.base_model
        self.head: torch.nn.Module = causal.get_output_embeddings()
        self.ends = ends_of(causal)
        """The ids that end an answer."""
        proofs = Proofs() if proofs is None else proofs
        if proofs.ways is None:
            with self.lockstep.passing():
                self_checks.head(causal)
                self_checks.positions(causal, settings.max_row_tokens)
                proofs.ways = self._proven_ways(causal) if settings.trees else []
        self._ways = proofs.ways
        if self._ways:
            causal.set_attn_implementation(attention.NAME)

    @property
    def trees(self) -> bool:
        """Whether rows are read as forests."""
        return bool(self._ways)

    def plan(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the positions of the rows in each micro-batch, within the budget."""
        if self.trees:
            return trees.batches([trees.ids(row.token_ids_T) for row in rows], self.budget.tokens)
        return by_length([len(row.token_ids_T) for row in rows], self.budget.tokens)

    def tokens(self, rows: Sequence[Row]) -> int:
        """Return the number of tokens in a forward pass over the rows as one micro-batch."""
        if self.trees:
            return len(trees.forest([trees.ids(row.token_ids_T) for row in rows]).token_ids_T)
        return len(rows) * max(len(row.token_ids_T) for row in rows)

    def batch(self, rows: Sequence[Row], weights: Sequence[float]) -> MicroBatch:
        """Return the rows as one micro-batch. `weights`: for each row, the weight of its tokens in the loss."""
        if self.trees:
            return MicroBatch.as_forest(rows, weights, self._ways, self._device, self.ends)
        return MicroBatch.padded(rows, weights, self._device, self.ends)

    def read(self, batch: MicroBatch, chosen_SK: Tensor | None = None, *, tools: bool = False) -> Read:
        """Run one forward pass. The head sees only the positions that predict a sampled token.

        `chosen_SK`: other tokens whose log probabilities are wanted there. `tools`: the head also sees the positions
        that predict tokens that tools gave.
        """
        if not tools or batch.tool_places_E is None or batch.tool_ids_E is None:
            return Read(*self.through_head(batch, partial(_figures, batch=batch, chosen_SK=chosen_SK)))
        read = partial(_figures_with_tools, batch=batch, chosen_SK=chosen_SK)
        return Read(*self.through_head(batch, read, everywhere=True))

    def likeliest(self, batch: MicroBatch, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` likeliest tokens at each sampled position and their log probabilities, both (S, K)."""
        return self.through_head(batch, partial(likeliest, temperatures_S=batch.temperatures_S, count=count))

    def through_head(
        self, batch: MicroBatch, read: Callable[[Tensor, torch.nn.Module], Result], *, everywhere: bool = False
    ) -> Result:
        """Run one forward pass. Return what `read` makes of the hidden states (S, H) and the head.

        `everywhere`: it gets the states (P, H) of all P = B·T positions.
        """
        with self.lockstep.passing():
            hidden_PH = self._hidden(batch)
            return through_head(self.head, read, hidden_PH if everywhere else hidden_PH[batch.places_S])

    def accompany(self, *, backward: bool = False) -> None:
        """Take part in a pass of other processes, for which this one has no rows; see `sharded.lockstep`."""
        with self.lockstep.passing(), torch.set_grad_enabled(backward):
            logprobs_S = self.read(self.batch([COMPANY], [0.0])).logprobs_S
            if backward:
                logprobs_S.sum().backward()

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states (P, H) of all P = B·T positions."""
        forest = {} if batch.tree is None else {"position_ids": batch.position_ids_BT, "tree": batch.tree}
        hidden_BTH = self._decoder(input_ids=batch.token_ids_BT, use_cache=False, **forest).last_hidden_state
        return cast(Tensor, hidden_BTH.flatten(0, 1))

    def _proven_ways(self, causal: PreTrainedModel) -> list[attention.Way]:
        """Return the ways in which the model reads forests. Its attention stays as it is."""
        before, reference = causal.config._attn_implementation, None
        proven: list[attention.Way] = []
        for way in attention.ways_of(self._settings.attention, self._device):
            try:
                reference = reference or self_checks.alone(causal, before)
                self_checks.forest(causal, reference, way)
                proven.append(way)
            except self_checks.NotProven as why:
                if ran_out(why):
                    raise
                log.warning("%s", why)
                reset(causal)
        if not proven:
            log.warning("rows are read side by side, one sequence each, which is slower")
        causal.set_attn_implementation(before)
        return proven


def _figures(
    hidden_SH: Tensor, head: torch.nn.Module, *, batch: MicroBatch, chosen_SK: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the fields of `Read`."""
    sampled = (hidden_SH, head, batch.token_ids_S, batch.temperatures_S)
    if batch.constrained:
        return constrained_head.token_logprobs(*sampled, batch.constrained)
    if chosen_SK is None:
        return token_logprobs(*sampled)
    chosen = chosen_logprobs(hidden_SH, head, chosen_SK, batch.temperatures_S)
    return (*token_logprobs(*sampled), chosen)


def _figures_with_tools(
    hidden_PH: Tensor, head: torch.nn.Module, *, batch: MicroBatch, chosen_SK: Tensor | None
) -> tuple[Any, ...]:
    """Return the fields of `Read`, with those of tokens that tools gave; these are read at temperature 1."""
    assert batch.tool_places_E is not None and batch.tool_ids_E is not None
    logprobs_S, entropies_S, *chosen = _figures(hidden_PH[batch.places_S], head, batch=batch, chosen_SK=chosen_SK)
    warmth_E = torch.ones(len(batch.tool_ids_E), device=hidden_PH.device)
    logprobs_E, _ = token_logprobs(hidden_PH[batch.tool_places_E], head, batch.tool_ids_E, warmth_E)
    return logprobs_S, entropies_S, chosen[0] if chosen else None, logprobs_E
