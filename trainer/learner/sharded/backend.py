"""The backend of a sharded base: transformers loads of each tensor what this process holds, and nothing else."""

import copy
import ctypes
from collections.abc import Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from accelerate import init_empty_weights
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from trainer.errors import ModelUnusable, PeersMissing
from trainer.learner import hf
from trainer.learner.sharded.units import shard
from whetstone.config.trainer import TrainerSettings

MADV_DONTNEED = 4
"""Linux's number; Python's own is missing elsewhere."""
_LIBC = ctypes.CDLL(None)

adapted = hf.adapted
made_ready = hf.made_ready


def load(model_path: str | Path, _settings: TrainerSettings, device: torch.device) -> PreTrainedModel:
    """Load this process's share of the base model; all processes call this.

    The model is made without memory for its weights, sharded, and then filled: transformers reads of each tensor in the
    files the rows that this process holds.

    Raises:
        ModelUnusable: it does not exist or cannot be read.
        PeersMissing: this process is not one of several.
    """
    if not distributed.is_initialized():
        raise PeersMissing(
            "trainer.sharding is fsdp, which divides the base model among the processes of a step, and this process is "
            "alone: start the training worker with `whetstone up`, or set trainer.sharding to none"
        )
    transformers_logging.disable_progress_bar()
    try:
        kind = _sharded_class(model_path, init_device_mesh(device.type, (distributed.get_world_size(),)))
        model: PreTrainedModel = kind.from_pretrained(
            str(model_path), dtype="auto", use_safetensors=True, device_map={"": hf.with_number(device)}
        )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelUnusable(f"{model_path}: {error}") from error
    if device.type == "cuda":
        torch.cuda.empty_cache()  # transformers reserves room for the whole model
    else:
        _read_in(model)
    return model.requires_grad_(False)


def _read_in(model: PreTrainedModel) -> None:
    """Copy this process's share out of the files, which are mapped to memory, one parameter after the other.

    The kernel maps what lies around each page that is read, so other processes' rows would count as this one's; and
    what was copied would count twice, until all of a file is.
    """
    files = _mapped_files()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            own = parameter._local_tensor
            mapped, own.data = own.data, own.clone()
            _let_go(mapped, files)


def _mapped_files() -> list[tuple[int, int]]:
    """Return where files are mapped to this process's memory, from address to address; nothing but on Linux."""
    maps = Path("/proc/self/maps")
    lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()] if maps.exists() else []
    spans = (line[0].split("-") for line in lines if line[4] != "0")  # the fifth is the file's inode
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def _let_go(mapped: torch.Tensor, files: Sequence[tuple[int, int]]) -> None:
    """Tell the kernel that pages of a file need not stay. Memory that is no file's would be lost by this."""
    start = -(-mapped.data_ptr() // PAGESIZE) * PAGESIZE
    end = (mapped.data_ptr() + mapped.nbytes) // PAGESIZE * PAGESIZE
    if mapped.is_contiguous() and end > start and any(first <= start and end <= last for first, last in files):
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def modules_on(loaded: PreTrainedModel) -> PreTrainedModel:
    """Return the model with modules of its own on the shards of a loaded one."""
    kind: Any = type(loaded)
    with init_empty_weights(include_buffers=False):
        own = cast(PreTrainedModel, kind(copy.deepcopy(loaded.config)))
    own.requires_grad_(False)
    own.load_state_dict(loaded.state_dict(), assign=True)
    own.tie_weights()
    own.generation_config = copy.deepcopy(loaded.generation_config)
    return own.eval()


def _sharded_class(model_path: str | Path, mesh: DeviceMesh) -> type[PreTrainedModel]:
    """Return the model's class, but that its models are sharded as soon as they are made."""
    with torch.device("meta"):
        plain = type(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(model_path))))

    def made(self: PreTrainedModel, *args: Any, **named: Any) -> None:
        plain.__init__(self, *args, **named)
        shard(self, mesh)

    return type(plain.__name__, (plain,), {"__init__": made, "__module__": plain.__module__})
