"""Unsloth's code for CUDA on a CPU: Triton interprets its kernels. Run in Unsloth's environment by test_unsloth.py.

`unsloth_interpreted.py MODEL SEED FILE` takes one step and writes the state of the optimizer. What stands for CUDA here
says that there is one device, and that tensors on the CPU are on it.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "TRITON_INTERPRET": "1", "UNSLOTH_COMPILE_DISABLE": "1"}

import torch


class Properties:
    """Of a device that has Unsloth's kernels."""

    name, total_memory, major, minor, multi_processor_count = "interpreter", 80 * 2**30, 8, 0, 1


class Device:
    """The one device, as a context."""

    idx = 0

    def __init__(self, *_given: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_raised: object) -> None: ...


class Stream:
    """Its stream: the interpreter returns when a kernel is done."""

    cuda_stream = 0

    def synchronize(self) -> None: ...


class OneDevice(list[Any]):
    """A list with an entry for each device, which a tensor on the CPU finds without an index."""

    def __getitem__(self, _index: Any) -> Any:
        return super().__getitem__(0)

    def __setitem__(self, _index: Any, value: Any) -> None:
        super().__setitem__(0, value)


class DeviceCount(int):
    """1; `[None] * DeviceCount(1)` is a OneDevice."""

    def __rmul__(self, entries: Any) -> Any:
        return OneDevice(entries)


torch.cuda.get_device_properties = lambda *_: Properties
torch.cuda.get_device_capability = lambda *_: (8, 0)
torch.cuda.device = Device
torch.cuda.current_stream = lambda *_: Stream()
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.is_current_stream_capturing = lambda: False
torch._C._cuda_getCurrentRawStream = lambda *_: 0

import unsloth.models.llama  # noqa: E402

unsloth.models.llama.DEVICE_COUNT = DeviceCount(1)
torch.cuda.current_device = lambda: torch.device("cpu")

from tests.unit.trainer.learner.test_unsloth import SETTINGS, stepped  # noqa: E402

if __name__ == "__main__":
    model, seed, target = sys.argv[1:]
    learner = stepped(Path(model), SETTINGS.model_copy(update={"backend": "unsloth"}), int(seed))
    Path(target).write_bytes(learner.files()["optimizer.safetensors"])
