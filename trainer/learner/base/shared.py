"""Keep one base model in the process: read, hashed and proven once, under the LoRAs of all policies.

Each learner gets modules of its own on the same weights, and puts its LoRA on those; no LoRA ever touches another's.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.domain.base import BaseModel
from trainer.learner.backends import backend_of, base_of, folder_of
from trainer.learner.base.residence import HostWeights
from trainer.learner.forward import Proofs
from trainer.learner.sharded.backend import modules_on
from whetstone.config.trainer import TrainerSettings


@dataclass(frozen=True, slots=True)
class SharedBase:
    """A base model on its device."""

    identity: BaseModel
    proofs: Proofs
    """What was proven of it; empty until its first learner."""
    _model: PreTrainedModel = field(repr=False)
    """Nothing is ever put on this one."""
    host: HostWeights | None = None
    """Its weights in host memory, if they leave the device between steps."""
    is_sharded: bool = False
    """Whether this process has a share of the weights only."""

    def modules(self, device: torch.device) -> PreTrainedModel:
        """Return the model with modules of its own on the shared weights, which are moved to the device."""
        if self.is_sharded:
            return modules_on(self._model)
        weights: dict[int, Tensor] = {id(weight): weight for weight in self._model.parameters()}
        own: PreTrainedModel = copy.deepcopy(self._model, weights)
        if self.host is None and any(weight.device.type != device.type for weight in own.parameters()):
            own.to(device)  # moves a parameter in place, so under every learner
        return own


_latest: dict[object, SharedBase] = {}
"""One at most."""


def shared_base(model_path: str | Path, settings: TrainerSettings, device: torch.device) -> SharedBase:
    """Return the base model; the same object while its files, the settings and the device are the same.

    Only the latest is kept: no process trains on two, and a device rarely has room for them.

    Raises:
        ModelUnusable: it cannot be loaded.
    """
    key = (str(model_path), _files(folder_of(model_path)), settings, device)
    if key not in _latest:
        _latest.clear()  # the next one needs its memory
        model = backend_of(settings).load(model_path, settings, device)
        host = HostWeights(model.requires_grad_(False).parameters(), device) if settings.offload else None
        _latest[key] = SharedBase(base_of(model_path), Proofs(), model, host, settings.sharding == "fsdp")
    return _latest[key]


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of change of the files that make the model."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
