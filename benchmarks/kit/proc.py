"""What Linux says of a process in /proc (proc(5)): whether it is alive, its children, CPU time and memory.

A process that has ended has no CPU time, no memory and no children.
"""

import os
from pathlib import Path


def stat(pid: int) -> list[str]:
    """Return the fields of its `stat` from the state on; only state X (dead) and no parent if it is gone."""
    try:
        # The name before them may contain anything, brackets too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "-1"]


def is_alive(pid: int) -> bool:
    """Return whether it runs; a zombie does not."""
    return stat(pid)[0] not in "ZX"


def children(pid: int) -> list[int]:
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [child for child in pids if int(stat(child)[1]) == pid]


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def cpu_s(pid: int) -> float:
    return sum(map(int, stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int | str, field: str = "VmRSS") -> int:
    """Return its resident memory, or the maximum of that (`VmHWM`)."""
    return _bytes(pid, "status", field)


def share_of_memory_bytes(pid: int) -> int:
    """Return its resident memory, where a page that several processes have counts in parts (Pss): sums are true."""
    return _bytes(pid, "smaps_rollup", "Pss")


def _bytes(pid: int | str, file: str, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
