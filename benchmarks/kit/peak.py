"""Measure the largest memory that a block of code uses, beyond what was used before it."""

import ctypes
import gc
import re
from pathlib import Path
from types import TracebackType
from typing import Self

import torch


class Peak:
    """`with Peak(device) as peak: ...; peak.mib`. On the CPU of this process, on Linux; on CUDA of its tensors."""

    def __init__(self, device: str) -> None:
        self.mib = 0.0
        self._on_cuda = device == "cuda"

    def __enter__(self) -> Self:
        gc.collect()
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() / 2**20
        else:
            # Memory that is free but not yet returned by the allocator would hide later use.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
            self._before = _status_mib("VmRSS")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        peak = torch.cuda.max_memory_allocated() / 2**20 if self._on_cuda else _status_mib("VmHWM")
        self.mib = peak - self._before


def _status_mib(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) / 1024
