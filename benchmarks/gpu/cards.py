"""Read the memory that processes take of the GPUs and of the host, over time."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.kit import proc

EVERY_S = 0.5
"""nvidia-smi itself takes a tenth of a second; a step's peak lasts for seconds."""
TIMEOUT_S = 60.0


def used_mib(nvidia_smi: str = "nvidia-smi") -> dict[int, int]:
    """Return pid -> MiB of GPU memory that it has, over all GPUs."""
    used: dict[int, int] = {}
    for pid, memory in _query(nvidia_smi, "--query-compute-apps=pid,used_gpu_memory"):
        if memory.isdigit():  # "[N/A]" where the driver does not say
            used[int(pid)] = used.get(int(pid), 0) + int(memory)
    return used


def _query(nvidia_smi: str, what: str) -> list[list[str]]:
    command = [nvidia_smi, what, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if "," in line]


@dataclass
class Peak:
    """The most memory that a part of the stack has had, in MiB."""

    gpu_mib: int = 0
    host_mib: int = 0


class Peaks:
    """Peaks by part, each with its children; `during` measures while its block runs."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """`pids`: part -> its process, asked for each time, since a part may be restarted."""
        self._pids = pids
        self.of: dict[str, Peak] = {}

    def look(self) -> None:
        """Take one measurement."""
        used = used_mib()
        for part, pid in self._pids().items():
            members = [pid, *proc.descendants(pid)]
            peak = self.of.setdefault(part, Peak())
            peak.gpu_mib = max(peak.gpu_mib, sum(used.get(member, 0) for member in members))
            peak.host_mib = max(peak.host_mib, sum(map(proc.share_of_memory_bytes, members)) // 2**20)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Measure twice a second until the block ends."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(EVERY_S):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.look()
