"""Random adapters for `swaps`, far from one another and from the base, written as the trainer writes its own.

Versions alternate between two sets of weights, so the answers of any version can be computed again from two learners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import safetensors.torch
import torch
from sqlalchemy import Engine

from migrations import schema
from trainer.adapters.files import write
from trainer.domain.base import BaseModel
from trainer.learner.learner import ADAPTER_WEIGHTS, Learner
from whetstone.config.settings import Settings
from whetstone.config.trainer import TrainerSettings
from whetstone.domain.ids import version_id
from whetstone.vllm.client import Vllm

SCALE = 0.1
"""Standard deviation of the second matrix of each LoRA layer: the starter's are then about 2 nats per token apart."""
PROMPTS, TOKENS = 12, 24
"""For the distances: how many prompts each set answers, and how long."""


@dataclass(frozen=True)
class Weights:
    """An adapter's files, as `trainer.adapters.files.write` takes them."""

    base: BaseModel
    content: Mapping[str, bytes]
    rank: int

    def files(self) -> Mapping[str, bytes]:
        """File name -> contents."""
        return self.content


def random_weights(settings: Settings, seed: int, rank: int) -> Weights:
    """Return a LoRA whose every layer is random."""
    learner = Learner.fresh(settings.model, _of_rank(settings.trainer, rank), seed)
    files = learner.files()
    draw = torch.Generator().manual_seed(seed)
    tensors = safetensors.torch.load(files[ADAPTER_WEIGHTS])
    for name, tensor in sorted(tensors.items()):
        if "lora_B" in name:
            tensors[name] = SCALE * torch.randn(tensor.shape, generator=draw)
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    return Weights(learner.base, {**files, ADAPTER_WEIGHTS: weights}, rank)


def _of_rank(trainer: TrainerSettings, rank: int) -> TrainerSettings:
    return trainer.model_copy(update={"lora_rank": rank, "lora_alpha": 2 * rank})


class Sets:
    """The two sets of weights, in a folder of their own, and learners of each and of the base."""

    def __init__(self, settings: Settings, folder: Path, seed: int, ranks: tuple[int, int]) -> None:
        self._settings = settings
        self.weights = [random_weights(settings, seed + number, rank) for number, rank in enumerate(ranks, 1)]
        self.folders = [folder / name for name in ("a", "b")]
        for weights, one in zip(self.weights, self.folders, strict=True):
            write(one, weights, parent=0, step=0)
        self._learners = [
            Learner.fresh(settings.model, settings.trainer, seed),
            *(
                Learner.resume(settings.model, one, _of_rank(settings.trainer, weights.rank))
                for weights, one in zip(self.weights, self.folders, strict=True)
            ),
        ]

    @staticmethod
    def speaker(version: int) -> int:
        """Return the index of this version's weights: 0 the base, 1 the first set, 2 the second."""
        return 0 if version == 0 else 2 - version % 2

    def logprobs(self, speaker: int, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token in nats under these weights, computed by the trainer."""
        return self._learners[speaker].logprobs(prompt_ids, token_ids)

    def distances(self, control: Vllm, names: Sequence[str], prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return mean |Δ| in nats per token between each two weights, over what vLLM samples under each of the two.

        `names` are the names of the three on the server.
        """
        samples = [
            [(prompt, control.sample(name, prompt, TOKENS, seed)) for seed, prompt in enumerate(prompts[:PROMPTS])]
            for name in names
        ]
        distances = {}
        for one, other, label in ((0, 1, "base and a"), (0, 2, "base and b"), (1, 2, "a and b")):
            gaps = [
                abs(x - y)
                for prompt, sampled in samples[one] + samples[other]
                for x, y in zip(
                    self.logprobs(one, prompt, sampled.token_ids),
                    self.logprobs(other, prompt, sampled.token_ids),
                    strict=True,
                )
            ]
            distances[label] = sum(gaps) / len(gaps)
        return distances

    def add_version(self, engine: Engine, version: int, parent: int) -> None:
        """Write the version's folder and its row, as a step leaves them: a candidate that has to be loaded."""
        settings = self._settings
        name = version_id(settings.policy, version)
        folder = settings.data / "adapters" / name
        manifest_sha256 = write(folder, self.weights[self.speaker(version) - 1], parent=parent, step=version)
        with engine.begin() as connection:
            connection.execute(
                schema.policy_versions.insert().values(
                    project=settings.project,
                    id=name,
                    policy=settings.policy,
                    version=version,
                    parent=parent,
                    state="candidate",
                    origin="swaps",
                    adapter_path=str(folder),
                    manifest_sha256=manifest_sha256,
                    served=True,
                    created_at=datetime.now(UTC),
                )
            )
