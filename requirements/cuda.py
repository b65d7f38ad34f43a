"""Write the locks of machines with NVIDIA GPUs: `cuda.py UV [ARGUMENT ...]`. Called by `make lock`, after cpu.lock.

- Versions are those of cpu.lock wherever a part can have them, so that what the tests run is what a GPU host runs.
- PyTorch is the build of the public Python index, which is CUDA's; the locks hold no CPU build.
- The locks are for CPython 3.11 to 3.13 on Linux x86-64; entries for other machines are left out.
- Versions that still fit stay; `--upgrade` chooses anew what cpu.lock does not have.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from parts import FOLDER, HOST, entries

PYTHONS = ("3.11", "3.12", "3.13")
OF_PYTORCH = ("torch", "triton")
"""What is of another build, or of another version, beside PyTorch's CUDA build."""


@dataclass(frozen=True)
class Part:
    """What a lock is made of."""

    header: str
    extras: tuple[str, ...]
    """Of pyproject.toml."""
    free: tuple[str, ...] = ()
    """Packages whose versions need not be those of cpu.lock."""


PARTS = {
    "server-cuda": Part(
        "What a GPU host without containers has: vLLM, the proxy, the judge, the trainer, the tests.",
        ("serving-cuda", "judge", "training", "quantised", "tracing", "export", "demo", "dev"),
        free=("apache-tvm-ffi",),
    ),
    "trainer-cuda": Part("What the image of the trainer has with CUDA.", ("training", "quantised", "tracing")),
    "trainer-unsloth": Part(
        "What the image of the trainer has with CUDA and Unsloth, which takes an older transformers.",
        ("training", "quantised", "tracing", "unsloth"),
        free=("fsspec", "transformers"),
    ),
}


def for_gpu_hosts(text: str) -> bool:
    """Return whether an entry of a lock is for Linux x86-64 and one of PYTHONS."""
    marker = Requirement(text.splitlines()[0].rstrip(" \\")).marker
    return marker is None or any(
        marker.evaluate(HOST | {"python_version": one, "python_full_version": f"{one}.9"}) for one in PYTHONS
    )


def constraints(free: tuple[str, ...]) -> str:
    """Return the versions of cpu.lock, without those of PyTorch's build and of the packages in `free`."""
    lines = [text.splitlines()[0].rstrip(" \\") for text in entries(FOLDER / "cpu.lock")]
    own = {*OF_PYTORCH, *free}
    return "\n".join(line for line in lines if canonicalize_name(Requirement(line).name) not in own)


def compiled(uv: str, name: str, part: Part, arguments: list[str]) -> str:
    """Return the text of a part's lock, as uv resolves it. Raises CalledProcessError if it cannot."""
    lock = FOLDER / f"{name}.lock"
    with tempfile.TemporaryDirectory() as folder:
        bounds, target = Path(folder) / "constraints.txt", Path(folder) / lock.name
        bounds.write_text(constraints(part.free) + "\n", encoding="utf-8")
        if lock.is_file():
            target.write_text(lock.read_text(encoding="utf-8"), encoding="utf-8")  # uv keeps what still fits
        extras = [word for extra in part.extras for word in ("--extra", extra)]
        # setuptools installs our own packages, without an index.
        command = [
            uv, "pip", "compile", "pyproject.toml", "-", *extras, "--constraints", str(bounds), "--python-version",
            PYTHONS[0], "--universal", "--generate-hashes", "--no-annotate", "--no-header", "--quiet",
            "--output-file", str(target), *arguments,
        ]  # fmt: skip
        subprocess.run(command, cwd=FOLDER.parent, input="setuptools\n", text=True, check=True)
        kept = [text for text in entries(target) if for_gpu_hosts(text)]
    header = f"# {part.header} CPython 3.11 to 3.13, Linux x86-64. Made by `make lock`.\n"
    return header + "\n".join(sorted(kept, key=lambda text: re.split(r"[= ]", text)[0])) + "\n"


if __name__ == "__main__":
    for name, part in PARTS.items():
        text = compiled(sys.argv[1], name, part, sys.argv[2:])
        (FOLDER / f"{name}.lock").write_text(text, encoding="utf-8")
