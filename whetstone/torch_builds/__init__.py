"""Find packages that were built for another torch, and keep vLLM and the trainer from importing them.

vLLM's CPU build requires torchvision, torchaudio and torchcodec, of any build. Without a lock pip takes those of the
package index, which are built for CUDA. Beside torch's CPU build they cannot be imported, and transformers, which
imports whatever is installed, ends with "operator torchvision::nms does not exist". Text models need none of them.
"""

import os
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""What is hidden, all at once; `sitecustomize.py` beside this file names the same."""
IMPORT_TIMEOUT_S = 120


@cache
def mismatched() -> tuple[str, ...]:
    """Return which of PACKAGES are of another build than torch, as "name version"; none if all can be imported.

    Only those of another build are tried, since an import takes seconds.
    """
    torch = _version("torch")
    if torch is None:
        return ()
    installed = ((name, _version(name)) for name in PACKAGES)
    others = {name: version for name, version in installed if version is not None and _build(version) != _build(torch)}
    return () if all(map(_imports, others)) else tuple(f"{name} {version}" for name, version in others.items())


def is_cpu_build(python: Path | None = None) -> bool:
    """Return whether torch is its build for machines without a GPU; unknown, and False, of another `python`."""
    return python is None and _build(_version("torch") or "") == "cpu"


def environment(python: Path | None = None) -> dict[str, str]:
    """Return what hides PACKAGES from a program and its children if they do not match torch, else nothing.

    A program that runs on another `python` has packages of its own. Python imports the first `sitecustomize` that it
    finds, so one of the user's does not run in these processes.
    """
    if python is not None or not mismatched():
        return {}
    own = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent), *([own] if own else [])])}


def warning() -> str | None:
    """Return which packages do not match torch, what follows, and what to do; None if all match."""
    if not mismatched():
        return None
    return (
        f"not built for torch {_version('torch')}, cannot be imported: {', '.join(mismatched())}. vLLM and the trainer "
        f"run without {', '.join(PACKAGES)}, which text models do not need. To remove them: "
        f"pip uninstall {' '.join(PACKAGES)}"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _build(release: str) -> str:
    """Return the local part of a version: "cpu" of "2.13.0+cpu", "" of "2.13.0"."""
    return release.partition("+")[2]


def _imports(package: str) -> bool:
    # -P: do not import from the working directory.
    command = [sys.executable, "-P", "-c", f"import {package}"]
    return not subprocess.run(command, capture_output=True, timeout=IMPORT_TIMEOUT_S, check=False).returncode
