"""Train one policy on a training service, which has its weights and its optimizer.

Between two steps only the address of what the service has saved stays here, in the adapter's folder. A step that failed
leaves a model there that may have moved; the next one starts from what was saved, with a model of its own.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trainer.domain.base import BaseModel
from trainer.domain.figures import StepFigures
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Answer, Row
from trainer.errors import AdapterMismatch, NotFinite, RowError, ServiceRefused
from trainer.learner import updates
from trainer.learner.backends import base_of, check_base, folder_of
from trainer.learner.base.model_files import end_ids
from trainer.learner.gradient.objective import Sums, Terms, figures_of, row_weights
from trainer.learner.service import data
from trainer.learner.service.api import Checkpoint, Service
from whetstone.config.trainer import Kind, Quantisation, TrainerSettings
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.memory.learning_rate import learning_rate_of
from whetstone.memory.model_files import of_folder
from whetstone.registry.adapters import CONFIG, verify

STATE = "training_service.json"
"""File of an adapter's folder: where the service has the weights and the optimizer."""
KINDS: tuple[Kind, ...] = ("grpo", "sft")
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""As torch's AdamW has them."""


class State(msgspec.Struct, frozen=True):
    """Where a version's weights and optimizer are, and what the optimizer's moments are of."""

    saved: Checkpoint
    url: str
    kind: Kind
    """The kind of step that the moments are of."""
    updates: int
    """How many updates."""


class ServiceLearner:
    """A policy's LoRA on a service. Created by `Services`."""

    can_double = False
    quantisation: Quantisation = "none"

    def __init__(
        self,
        service: Service,
        base: BaseModel,
        ends: frozenset[int],
        learning_rate: float,
        settings: TrainerSettings,
        at: TrainingServiceSettings,
        model: str,
        seed: int,
        state: State | None,
    ) -> None:
        """`model`: the base model's name on the service; `state`: what the LoRA continues from."""
        self.base, self.ends = base, ends
        self._service, self._settings, self._at = service, settings, at
        self._learning_rate, self._name, self._seed = learning_rate, model, seed
        self._model_id = self._created(state, optimizer=True)
        self._reads_with = self._model_id
        self._state = state
        self._files: Mapping[str, bytes] = {}

    def step(
        self,
        rows: Sequence[Row],
        version_in: int,
        on_progress: Callable[[int, int], None] | None = None,
        kind: Kind = "grpo",
        reference: Path | None = None,
    ) -> StepFigures:
        """Make the step's optimizer updates on the service, save them there, and fetch the adapter.

        See `Learner.step`. Drop this learner where anything is raised: the service's model may have moved.

        Raises:
            RowError: no row has a sampled token, a row begins with one, or one was constrained or sampled at another
                temperature than 1.
            NotFinite: a logprob or the gradient's norm is NaN or infinite; nothing was saved.
            ServiceRefused: the kind of step is none that the API has, or the adapter has another rank.
            ServiceDown: the service cannot be reached, is too slow, or refuses a request.
        """
        if kind not in KINDS:
            raise ServiceRefused(
                f"training_service: a step of the kind {kind} needs more than the Tinker API has: it takes steps on "
                "rewards and supervised ones"
            )
        rows = [row for row in rows if any(row.sampled_T)]
        if not rows:
            raise RowError("no row has a sampled token: there is nothing to learn from")
        if any(row.sampled_T[0] for row in rows):
            raise RowError("a row begins with a sampled token, which nothing predicts")
        if kind != "sft" and self.must_measure(rows):
            raise RowError(
                "a row has constrained tokens, or such of another temperature than 1: they were not measured"
            )
        parts = updates.of_step(rows, kind, self._settings)
        loss = data.loss_of(self._settings, kind)
        before = self._moments(kind)
        requests = [list(data.requests([len(row.token_ids_T) for row in part])) for part in parts]
        done, total = 0, sum(map(len, requests))
        terms: list[Terms] = []
        summed: list[Sums] = []
        norms: list[float] = []
        for number, (part, batches) in enumerate(zip(parts, requests, strict=True)):
            tokens = sum(sum(row.sampled_T) for row in part)
            weights = row_weights(part, tokens, kind, self._settings)
            sent = self._data(part, weights, kind)
            logprobs: list[list[float]] = []
            for places in batches:
                batch = [sent[place] for place in places]
                logprobs += self._service.pass_through(self._model_id, batch, loss.name, loss.config, backward=True)
                done += 1
                if on_progress is not None:
                    on_progress(done, total)
            _check(logprob for row_logprobs in logprobs for logprob in row_logprobs)
            rate = updates.learning_rate(self._settings, self._learning_rate, kind, before + number)
            norm = _norm(self._service.update(self._model_id, self._adam(rate)))
            norms += [] if norm is None else [norm]
            _check(norms)
            terms.append(Terms(part, weights, frozenset(), tokens, version_in, kind))
            summed.append(data.sums_of(terms[-1], logprobs, self._settings))
        self._state = State(self._service.save(self._model_id), self._at.url, kind, before + len(parts))
        self._files = self._adapter(self._state)
        return figures_of(terms, summed, max(norms, default=None), rate)

    def must_measure(self, rows: Sequence[Row]) -> bool:
        """Return whether tokens were sampled as the service cannot compute: with a constraint, at another
        temperature."""
        return any(map(_is_bent, rows))

    def measure(
        self,
        rows: Sequence[Row],
        version_in: int,
        adapters: Mapping[int, Path | None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> MeasuredRows:
        """Return the rows without the trajectories that the service cannot compute. See `Learner.measure`.

        It gives the probabilities of sampled tokens, at temperature 1 and without a constraint, and the recorded ones
        are those of the distribution that was sampled from.
        """
        bent = frozenset(row.trajectory_id for row in rows if _is_bent(row))
        return MeasuredRows(tuple(row for row in rows if row.trajectory_id not in bent), decided={}, left_out=bent)

    def logprobs_of(self, answers: Sequence[Answer]) -> list[list[float]]:
        """Return the logprob of each token of each answer. See `Learner.logprobs_of`."""
        if not all(answer.prompt_ids and answer.token_ids for answer in answers):
            raise RowError("logprobs need a prompt and at least one token")
        sequences = [(*answer.prompt_ids, *answer.token_ids) for answer in answers]
        read: list[list[float]] = []
        for places in data.requests([len(ids) for ids in sequences]):
            batch = [data.datum_to_read(sequences[place]) for place in places]
            read += self._service.pass_through(self._reads_with, batch, "importance_sampling", None, backward=False)
        return [
            logprobs[len(ids) - 1 - len(answer.token_ids) : len(ids) - 1]
            for logprobs, ids, answer in zip(read, sequences, answers, strict=True)
        ]

    @contextmanager
    def as_version(self, adapter_folder: Path | None) -> Iterator[None]:
        """Read with that version's weights inside the context; None: with the base model's.

        Raises:
            AdapterDamaged, AdapterMismatch: see `Services.resume`.
        """
        state = None if adapter_folder is None else read_state(adapter_folder, self.base, self._at)
        other = self._created(state, optimizer=False)
        self._reads_with = other
        try:
            yield
        finally:
            self._reads_with = self._model_id
            self._service.unload(other)

    def doubled(self) -> AbstractContextManager[None]:
        """Raise NotImplementedError: the API has no way to scale a LoRA, see `can_double`."""
        raise NotImplementedError("a training service has no way to scale a LoRA")

    def files(self) -> Mapping[str, bytes]:
        """Return the adapter as the service trained it, and where it has what `resume` needs."""
        return self._files

    def close(self) -> None:
        """End the session on the service, with its models."""
        self._service.close()

    def _adapter(self, state: State) -> Mapping[str, bytes]:
        """Fetch the adapter, and name the base model in its configuration as we do."""
        files = self._service.adapter(self._model_id)
        config: dict[str, Any] = json.loads(files[CONFIG])
        if config.get("r") != self._settings.lora_rank:
            raise ServiceRefused(
                f"training_service: the adapter has rank {config.get('r')}, and trainer.lora_rank is "
                f"{self._settings.lora_rank}"
            )
        config |= {"base_model_name_or_path": self.base.name, "inference_mode": True}
        return {
            **files,
            CONFIG: json.dumps(config, indent=1, sort_keys=True).encode() + b"\n",
            STATE: msgspec.json.encode(state) + b"\n",
        }

    def _created(self, state: State | None, *, optimizer: bool) -> str:
        start = None if state is None else state.saved
        return self._service.create(self._name, self._settings.lora_rank, self._seed, start, optimizer=optimizer)

    def _moments(self, kind: Kind) -> int:
        """Return how many updates the optimizer's moments are of.

        Those of another kind of step are dropped, where the service can load weights without them.
        """
        if self._state is None:
            return 0
        if self._state.kind != kind:
            self._service.load(self._model_id, self._state.saved, optimizer=False)
            return 0
        return self._state.updates

    def _data(self, part: Sequence[Row], weights: Sequence[float], kind: Kind) -> list[dict[str, Any]]:
        made = data.datum_to_imitate if kind == "sft" else data.datum
        return [
            made(row, weight * data.scale_of(self._at.sums, row, len(part)))
            for row, weight in zip(part, weights, strict=True)
        ]

    def _adam(self, rate: float) -> dict[str, float]:
        return {
            "learning_rate": rate,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "eps": EPSILON,
            "weight_decay": self._settings.weight_decay,
            "grad_clip_norm": self._settings.clip_norm,
        }


class Services:
    """Makes the learners of one service. Its methods are those of the class `Learner`. Other threads may not use it."""

    def __init__(self, at: TrainingServiceSettings) -> None:
        self._at = at
        self.renew: Callable[[], None] = lambda: None
        """Called while a result is awaited; if it raises, the wait ends."""

    def fresh(self, model_path: str, settings: TrainerSettings, seed: int) -> ServiceLearner:
        """Return version 0.

        Raises:
            ModelUnusable: the base model's files are not on this machine: it needs them for hashes and sizes.
            ServiceDown: see `Service`.
        """
        return self._made(model_path, base_of(model_path), settings, seed, None)

    def resume(self, model_path: str, adapter_folder: Path, settings: TrainerSettings) -> ServiceLearner:
        """Return the learner that wrote the folder.

        Raises:
            AdapterDamaged: the folder's contents are not what was written.
            AdapterMismatch: it belongs to another base model, or another service trained it, or none.
            ModelUnusable, ServiceDown: see `fresh`.
        """
        base = base_of(model_path)
        return self._made(model_path, base, settings, 0, read_state(adapter_folder, base, self._at))

    def _renewed(self) -> None:
        self.renew()

    def _made(
        self, model_path: str, base: BaseModel, settings: TrainerSettings, seed: int, state: State | None
    ) -> ServiceLearner:
        name = self._at.model or model_path
        rate = learning_rate_of(settings, of_folder(folder_of(model_path)).parameters)
        ends = end_ids(model_path)
        service = Service(self._at, self._renewed)
        return ServiceLearner(service, base, ends, rate, settings, self._at, name, seed, state)


def read_state(adapter_folder: Path, base: BaseModel, at: TrainingServiceSettings) -> State:
    """Return where the service has what the folder's adapter continues from.

    Raises:
        AdapterDamaged: the folder's contents are not what was written.
        AdapterMismatch: it belongs to another base model, or was not trained by this service.
    """
    verify(adapter_folder)
    check_base(adapter_folder, base)
    try:
        state = msgspec.json.decode((adapter_folder / STATE).read_bytes(), type=State)
    except FileNotFoundError:
        raise AdapterMismatch(
            f"{adapter_folder.name} was not trained by a training service, which therefore cannot continue it: begin a "
            "new policy, or remove training_service"
        ) from None
    except msgspec.MsgspecError as error:
        raise AdapterMismatch(f"{adapter_folder / STATE}: {error}") from error
    if state.url != at.url:
        raise AdapterMismatch(
            f"{adapter_folder.name} was trained by the service at {state.url}, and training_service.url is {at.url}: "
            "set it back, or begin a new policy"
        )
    return state


def _is_bent(row: Row) -> bool:
    """Return whether tokens were not sampled from the plain distribution of their version."""
    return bool(row.constrained) or any(temperature != 1.0 for temperature in row.temperatures_T)


def _check(numbers: Iterable[float]) -> None:
    """Raise NotFinite where a number is none."""
    if not all(map(math.isfinite, numbers)):
        raise NotFinite("the training service gives numbers that are not finite: the step was not taken")


def _norm(metrics: Mapping[str, float | None]) -> float | None:
    """Return the gradient's norm, which servers name differently; NaN where it has none."""
    norms = [value for name, value in metrics.items() if name.rpartition("/")[2] == "grad_norm"]
    return None if not norms else math.nan if norms[0] is None else norms[0]
