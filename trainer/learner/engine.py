"""What a step needs of whatever computes it: `Learner` on this machine, or `ServiceLearner` on a training service."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from trainer.domain.base import BaseModel
from trainer.domain.figures import StepFigures
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Answer, Row
from whetstone.config.trainer import Kind, Quantisation, TrainerSettings


class Engine(Protocol):
    """A base model with one LoRA in training. `Learner` documents the methods."""

    can_double: bool
    """Whether `doubled` is possible."""

    @property
    def base(self) -> BaseModel:
        """The base model."""

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end an answer."""

    @property
    def quantisation(self) -> Quantisation:
        """How the base model's linear layers are quantised there."""

    def step(
        self,
        rows: Sequence[Row],
        version_in: int,
        on_progress: Callable[[int, int], None] | None = None,
        kind: Kind = "grpo",
        reference: Path | None = None,
    ) -> StepFigures:
        """Make the step's optimizer updates, or none of them."""

    def must_measure(self, rows: Sequence[Row]) -> bool:
        """Return whether `measure` has to see the rows before `step`."""

    def measure(
        self,
        rows: Sequence[Row],
        version_in: int,
        adapters: Mapping[int, Path | None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> MeasuredRows:
        """Return the rows without the tokens that constraints decided."""

    def logprobs_of(self, answers: Sequence[Answer]) -> list[list[float]]:
        """Return the logprob in nats of each token of each answer, at temperature 1, with this LoRA."""

    def as_version(self, adapter_folder: Path | None) -> AbstractContextManager[None]:
        """Have the weights of that adapter inside the context; None: the base model without an adapter."""

    def doubled(self) -> AbstractContextManager[None]:
        """Have twice the LoRA inside the context."""

    def files(self) -> Mapping[str, bytes]:
        """Return the adapter's files: file name -> contents."""


class EngineFactory(Protocol):
    """Makes engines: the class `Learner`, the leader of several processes, or a training service."""

    def fresh(self, model_path: str, settings: TrainerSettings, seed: int, /) -> Engine:
        """Return an engine of version 0."""

    def resume(self, model_path: str, adapter_folder: Path, settings: TrainerSettings, /) -> Engine:
        """Return the engine that wrote the folder."""
