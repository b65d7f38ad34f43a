"""Say what this machine lacks for PyTorch's CUDA build: a new driver, a compiler. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

OLDEST = 580
"""The first branch of drivers that has CUDA 13, which the locked PyTorch and vLLM are built for: table 2 of
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes."""
REMEDY = f"install NVIDIA's driver {OLDEST} or later, then start again"


def branch(nvidia_smi: str = "nvidia-smi") -> str | None:
    """Return the driver's version as nvidia-smi says it; None where there is no driver that answers."""
    command = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.decode(errors="replace").split()
    return lines[0] if done.returncode == 0 and lines and re.match(r"\d+\.", lines[0]) else None


def unfit(version: str | None) -> str | None:
    """Return why a driver of this version cannot run the CUDA build, with the remedy; None if it can."""
    if version is None:
        return f"there is no NVIDIA driver here that answers (nvidia-smi): {REMEDY}"
    if int(version.partition(".")[0]) < OLDEST:
        return f"the NVIDIA driver is {version}, and the packages are built for CUDA 13: {REMEDY}"
    return None


def without_compiler(own: Mapping[str, str] = os.environ) -> str | None:
    """Return what a missing C compiler prevents; None if there is one where Triton looks (triton/runtime/build.py)."""
    if own.get("CC") or any(shutil.which(name, path=own.get("PATH", "")) for name in ("gcc", "clang")):
        return None
    return (
        "there is no C compiler here (gcc or clang), by which Triton builds kernels: flex-attention and Unsloth cannot "
        "run; Debian: apt-get install gcc libc6-dev python3-dev"
    )


if __name__ == "__main__":
    if why := unfit(branch()):
        sys.exit(why)
