"""Compute the loss of a micro-batch, its gradient, and the figures beside it."""

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from peft import PeftModel
from torch import Tensor

from trainer.domain.figures import StepFigures
from trainer.domain.rows import Row
from trainer.learner import losses
from trainer.learner.forward import Read, Reading
from trainer.learner.gradient.divergence import Targets, divergence
from trainer.learner.gradient.preferences import PreferenceLoss
from trainer.learner.losses import PolicyLoss, Tokens, k3
from trainer.learner.micro_batches import MicroBatch
from whetstone.config.trainer import BY_EXAMPLE, PREFERENCES, Kind, TrainerSettings

LARGEST_RATIO = 1000.0
"""Of trainer to server, in a step's figures: one token that the server all but excluded must not make them infinite."""
LEAST_MEASURED_TOKENS = 128
"""Sampled tokens on which the distance from the base model is measured where an update has as many: of a few tokens,
one that the base model rarely writes is most of the mean.
"""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is fixed for a whole step before its first forward pass, so that any split of its rows adds up to the same.

    Rows are known by their position.
    """

    rows: Sequence[Row]
    weights: Sequence[float]
    """For each row, the weight of its tokens in the loss."""
    measured: frozenset[int]
    """The rows whose distance from the base model is measured."""
    tokens: int
    """Sampled tokens of all rows but those of past attempts."""
    version_in: int
    kind: Kind
    loss: float | None = None
    """The loss of preferences, which `weights` are the derivatives of; None where the rows' losses add up to it."""
    targets: Sequence[Targets] = ()
    """For each row, what the teacher says, where the step has one."""
    replayed: frozenset[int] = frozenset()
    """The rows of past attempts that are imitated beside the others."""
    tool_tokens: int = 0
    """Tokens that tools gave, where they are to be predicted."""


@dataclass(slots=True)
class Sums:
    """Sums over the tokens of a step so far."""

    loss: float = 0.0
    kl: float = 0.0
    measured: float = 0.0
    """Tokens that `kl` is over."""
    entropy: float = 0.0
    mismatch: float = 0.0
    compared: float = 0.0
    """Tokens that `mismatch` is over."""
    fresh: float = 0.0
    masked: float = 0.0
    ratios: float = 0.0
    """Of trainer to server, over tokens; 0 but in steps of the kind grpo."""
    squares: float = 0.0
    """Of the ratios."""
    read: float = 0.0
    """Tokens of the forward passes."""

    def add(self, sums_10: Sequence[float], read: int) -> None:
        """Add a micro-batch: all fields but the last, and its tokens."""
        loss, kl, measured, entropy_sum, mismatch, compared, fresh, masked, ratios, squares = sums_10
        self.loss += loss
        self.kl += kl
        self.measured += measured
        self.entropy += entropy_sum
        self.mismatch += mismatch
        self.compared += compared
        self.fresh += fresh
        self.masked += masked
        self.ratios += ratios
        self.squares += squares
        self.read += read


class Objective:
    """The loss of the settings, on one model."""

    def __init__(self, model: PeftModel, reading: Reading, settings: TrainerSettings, loss_scale: float) -> None:
        """Gradients are multiplied by `loss_scale`."""
        self._model = model
        self._reading = reading
        self._settings = settings
        self._loss_scale = loss_scale
        self._loss = losses.policy_loss(settings.loss, settings.clip_low, settings.clip_high, settings.tv_regulariser)

    def terms(
        self,
        rows: Sequence[Row],
        version_in: int,
        kind: Kind,
        preference: PreferenceLoss | None = None,
        targets: Sequence[Targets] = (),
    ) -> Terms:
        """Return the terms of a step over the rows.

        `preference`: of preferences, their loss; `targets`: of a step with a teacher, those of each row.
        """
        replayed = frozenset(place for place, row in enumerate(rows) if row.replayed)
        tokens = sum(sum(row.sampled_T) for row in rows if not row.replayed)
        if preference is not None:
            measured = self._measured(rows)
            return Terms(rows, preference.slopes_R, measured, tokens, version_in, kind, preference.loss)
        weights = row_weights(rows, tokens, kind, self._settings)
        measured = self._measured(rows)
        tool_tokens = 0
        if kind == "grpo" and self._settings.echo_weight:
            tool_tokens = sum(end - start for row in rows for start, end in row.tool_spans)
        return Terms(
            rows, weights, measured, tokens, version_in, kind,
            targets=targets, replayed=replayed, tool_tokens=tool_tokens,
        )  # fmt: skip

    def backward(self, terms: Terms, places: Sequence[int]) -> tuple[Tensor, int]:
        """Add the gradient of these rows as one micro-batch. Return the first ten of `Sums` over it, and its tokens.

        Raises:
            RowError: a row begins with a sampled token.
        """
        batch = self._batch(terms, places)
        among_S, base_M = self._base_logprobs(terms, places, batch)
        replayed_S = _are_in(terms.replayed, places, batch) if terms.replayed else None
        own_S = slice(None) if replayed_S is None else ~replayed_S
        with self._reading.lockstep.passing():
            if terms.targets:
                read, policy = self._beside_teacher(batch, [terms.targets[place] for place in places], terms.kind)
            else:
                read = self._reading.read(batch, tools=terms.tool_tokens > 0)
                policy = self.policy_loss(batch, read.logprobs_S, terms.kind, replayed_S)
            losses_S = policy.losses_S
            kl_M = k3(read.logprobs_S[among_S], base_M)
            if self._settings.kl_weight and terms.kind not in PREFERENCES:  # these have a reference of their own
                # All rows are measured but those of past attempts.
                kl_S = torch.zeros_like(losses_S).masked_scatter(among_S, kl_M)
                losses_S = losses_S + self._settings.kl_weight * kl_S
            loss = losses_S @ batch.weights_S
            if self._settings.entropy_weight:
                loss = loss - self._settings.entropy_weight * read.entropies_S[own_S].sum() / terms.tokens
            if read.tool_logprobs_E is not None:
                loss = loss - self._settings.echo_weight * read.tool_logprobs_E.sum() / terms.tool_tokens
            (loss * self._loss_scale).backward()
        with torch.no_grad():
            fresh_S = batch.versions_S == terms.version_in
            # Where a grammar acted, the server's logprobs and the trainer's are not of the same distribution.
            compared_S = fresh_S & batch.served_S
            bounded_S = _bounded(batch, read.logprobs_S)
            log_ratios_S = (bounded_S - batch.inference_logprobs_S)[own_S]
            ratios_S = log_ratios_S.exp() if terms.kind == "grpo" else losses_S.new_zeros(1)
            sums_10 = torch.stack(
                [
                    loss.detach(),
                    kl_M.sum(),
                    losses_S.new_tensor(float(len(kl_M))),
                    read.entropies_S[own_S].sum(),
                    k3(batch.inference_logprobs_S, bounded_S)[compared_S].sum(),
                    compared_S.sum().float(),
                    fresh_S.sum().float(),
                    policy.masked_S.sum().float(),
                    ratios_S.sum(),
                    ratios_S.square().sum(),
                ]
            )
        return sums_10, batch.token_ids_BT.numel()

    def accompany(self) -> None:
        """Take part in the passes of a round in which this process has no rows; the gradient becomes meaningless."""
        if self._reading.lockstep.anyone(False):
            self._reading.accompany()
        self._reading.accompany(backward=True)

    def policy_loss(
        self, batch: MicroBatch, trainer_S: Tensor, kind: Kind, replayed_S: Tensor | None = None
    ) -> PolicyLoss:
        """Return the loss of each sampled token without the terms for KL and entropy.

        `replayed_S`: bool, the tokens of past attempts, which are imitated; None where there are none.
        """
        if kind == "sft":
            return losses.nll(trainer_S)
        if kind in PREFERENCES:
            return losses.linear(trainer_S)
        tokens = Tokens(trainer_S, batch.inference_logprobs_S, batch.advantages_S, batch.sequences_S)
        if replayed_S is None:
            return losses.guarded(tokens, self._loss, self._settings.max_ratio, self._settings.max_sequence_ratio)
        own_S = ~replayed_S
        own = losses.guarded(
            tokens.among(own_S), self._loss, self._settings.max_ratio, self._settings.max_sequence_ratio
        )
        past = losses.nll(trainer_S)
        losses_S = past.losses_S.masked_scatter(own_S, own.losses_S)
        return PolicyLoss(losses_S, past.masked_S.masked_scatter(own_S, own.masked_S))

    def _beside_teacher(self, batch: MicroBatch, targets: Sequence[Targets], kind: Kind) -> tuple[Read, PolicyLoss]:
        """Return what is read, and the divergence from the teacher at each token."""
        device = batch.token_ids_S.device
        ids_SK = torch.cat([one.ids_NK for one in targets]).to(device)
        teacher_SK = torch.cat([one.logprobs_NK for one in targets]).to(device)
        read = self._reading.read(batch, ids_SK)
        assert read.chosen_SK is not None
        alpha = self._settings.distill_alpha if kind == "distill" else self._settings.hindsight_alpha
        losses_S = divergence(read.chosen_SK, teacher_SK, alpha)
        return read, PolicyLoss(losses_S, torch.zeros_like(losses_S, dtype=torch.bool))

    def _batch(self, terms: Terms, places: Sequence[int]) -> MicroBatch:
        return self._reading.batch([terms.rows[place] for place in places], [terms.weights[place] for place in places])

    def _base_logprobs(self, terms: Terms, places: Sequence[int], batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return which of the S tokens are measured, and the base model's logprobs of these M.

        It takes a forward pass without the adapter over the rows that are measured, and those alone.
        """
        chosen_B = [place in terms.measured for place in places]
        among_S = _are_in(terms.measured, places, batch)
        wants = any(chosen_B)
        if wants and not all(chosen_B):
            batch = self._batch(terms, [place for place in places if place in terms.measured])
        others_want = self._reading.lockstep.anyone(wants)
        if not wants:
            if others_want:
                self._reading.accompany()
            return among_S, batch.inference_logprobs_S.new_zeros(0)
        with torch.no_grad(), self._model.disable_adapter():
            return among_S, self._reading.read(batch).logprobs_S

    def _measured(self, rows: Sequence[Row]) -> frozenset[int]:
        """Return the rows whose distance from the base model is measured: a part drawn at random, the same each time.

        Rows of past attempts are not among them: this version did not sample them.
        `kl_share` of the rows, and more until they have LEAST_MEASURED_TOKENS.

        All processes draw the same, and so does a step that is taken again, though its version has another number.
        """
        own = [place for place, row in enumerate(rows) if not row.replayed]
        if self._settings.kl_weight:
            return frozenset(own)
        if not self._settings.measure_kl:
            return frozenset()
        seed = " ".join(rows[place].trajectory_id for place in own)
        drawn = random.Random(seed).sample(own, len(own))
        tokens = list(accumulate(sum(rows[place].sampled_T) for place in drawn))
        share = math.ceil(self._settings.kl_share * len(own))
        return frozenset(drawn[: max(share, bisect_left(tokens, LEAST_MEASURED_TOKENS) + 1)])


def row_weights(rows: Sequence[Row], step_tokens: int, kind: Kind, settings: TrainerSettings) -> list[float]:
    """Return, for each row, the weight of its tokens in the loss."""
    if kind in BY_EXAMPLE:
        return [1 / step_tokens] * len(rows)
    tokens: Counter[str] = Counter()
    past_tokens = 0
    for row in rows:
        if row.replayed:
            past_tokens += sum(row.sampled_T)
        else:
            tokens[row.trajectory_id] += sum(row.sampled_T)
    return [
        settings.replay_weight / past_tokens
        if row.replayed
        else losses.weight(
            settings.loss,
            trajectory_tokens=tokens[row.trajectory_id],
            trajectories=len(tokens),
            step_tokens=step_tokens,
            max_answer_tokens=settings.max_answer_tokens,
        )
        for row in rows
    ]


def figures_of(
    parts: Sequence[Terms], summed: Sequence[Sums], grad_norm: float | None, learning_rate: float
) -> StepFigures:
    """Return the figures of a step from the terms and the sums of each of its updates."""
    tokens = sum(terms.tokens for terms in parts)
    measured = sum(sums.measured for sums in summed)
    squares = sum(sums.squares for sums in summed)
    first = summed[0]  # after its update the weights are no longer those that the server sampled with
    return StepFigures(
        loss=sum(
            (sums.loss if terms.loss is None else terms.loss) * terms.tokens
            for sums, terms in zip(summed, parts, strict=True)
        )
        / tokens,
        kl=sum(sums.kl for sums in summed) / measured if measured else None,
        entropy=sum(sums.entropy for sums in summed) / tokens,
        mismatch_k3=first.mismatch / first.compared if first.compared else None,
        fresh_share=sum(sums.fresh for sums in summed) / tokens,
        masked_share=sum(sums.masked for sums in summed) / tokens,
        effective_share=sum(sums.ratios for sums in summed) ** 2 / squares / tokens if squares else None,
        grad_norm=grad_norm,
        sampled_tokens=tokens,
        read_tokens=int(sum(sums.read for sums in summed)),
        rows=sum(len(terms.rows) - len(terms.replayed) for terms in parts),
        learning_rate=learning_rate,
    )


def _are_in(rows: frozenset[int], places: Sequence[int], batch: MicroBatch) -> Tensor:
    """Return a bool for each of the batch's S tokens: whether its row is one of these. `places`: the batch's rows."""
    of_rows_B = torch.tensor([place in rows for place in places], device=batch.sequences_S.device)
    return of_rows_B[batch.sequences_S]


def _bounded(batch: MicroBatch, trainer_S: Tensor) -> Tensor:
    """Return the trainer's logprobs, of which a token is at most LARGEST_RATIO times likelier than on the server."""
    return torch.minimum(trainer_S, batch.inference_logprobs_S + math.log(LARGEST_RATIO))
