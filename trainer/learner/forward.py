"""Run the forward pass of one model: micro-batches in, log probabilities out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from trainer.domain.rows import Row
from trainer.learner import attention, self_checks
from trainer.learner import prefix_trees as trees
from trainer.learner.chunked_head import chosen_logprobs, likeliest, token_logprobs
from trainer.learner.constrained import head as constrained_head
from trainer.learner.gradient.memory import TokenBudget, ran_out
from trainer.learner.micro_batches import MicroBatch, by_length
from trainer.learner.model_files import ends_of
from whetstone.config.trainer import TrainerSettings

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
        self, model: PeftModel, settings: TrainerSettings, budget: TokenBudget, proofs: Proofs | None = None
    ) -> None:
        """Prove that our forward pass computes what the model's own does, unless `proofs` of its base model say so.

        Raises:
            ModelUnusable: it does not.
        """
        causal: PreTrainedModel = model.get_base_model()
        self._settings = settings
        self.budget = budget
        self._device: torch.device = model.device
        self._decoder: Any = causal.base_model
        self.head: torch.nn.Module = causal.get_output_embeddings()
        self.ends = ends_of(causal)
        """The ids that end an answer."""
        proofs = Proofs() if proofs is None else proofs
        if proofs.ways is None:
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
            return self._sampled(batch, self.hidden(batch), chosen_SK)
        hidden_PH = self._hidden_everywhere(batch)
        read = self._sampled(batch, hidden_PH[batch.places_S], chosen_SK)
        warmth_E = torch.ones(len(batch.tool_ids_E), device=hidden_PH.device)
        logprobs_E, _ = token_logprobs(hidden_PH[batch.tool_places_E], self.head, batch.tool_ids_E, warmth_E)
        return replace(read, tool_logprobs_E=logprobs_E)

    def _sampled(self, batch: MicroBatch, hidden_SH: Tensor, chosen_SK: Tensor | None) -> Read:
        sampled = (hidden_SH, self.head, batch.token_ids_S, batch.temperatures_S)
        if batch.constrained:
            return Read(*constrained_head.token_logprobs(*sampled, batch.constrained))
        if chosen_SK is None:
            return Read(*token_logprobs(*sampled))
        chosen = chosen_logprobs(hidden_SH, self.head, chosen_SK, batch.temperatures_S)
        return Read(*token_logprobs(*sampled), chosen)

    def likeliest(self, batch: MicroBatch, count: int) -> tuple[Tensor, Tensor]:
        """Return the `count` likeliest tokens at each sampled position and their log probabilities, both (S, K)."""
        return likeliest(self.hidden(batch), self.head, batch.temperatures_S, count)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states (S, H) that predict the sampled tokens."""
        return self._hidden_everywhere(batch)[batch.places_S]

    def _hidden_everywhere(self, batch: MicroBatch) -> Tensor:
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
        if not proven:
            log.warning("rows are read side by side, one sequence each, which is slower")
        causal.set_attn_implementation(before)
        return proven
