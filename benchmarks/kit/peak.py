"""Measure the largest memory that a block of code uses, beyond what was used before it."""

import ctypes
import gc
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from benchmarks.kit.proc import memory_bytes


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
            self._before = memory_bytes("self") / 2**20
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        peak = torch.cuda.max_memory_allocated() if self._on_cuda else memory_bytes("self", "VmHWM")
        self.mib = peak / 2**20 - self._before
