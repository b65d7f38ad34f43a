"""Writes the images' locks: what each of them needs of cpu.lock, and no more. `python requirements/parts.py [REPORT]`

Reads what the packages of this environment say they need. REPORT is what pip says of PyTorch's CUDA build:
`pip install --dry-run --ignore-installed --report REPORT torch==2.13.0`; without it these parts of cuda.lock stay.
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
EXTRAS = {"server": ("proxy", "judge", "tracing"), "trainer": ("training", "tracing")}
"""Image -> the extras of pyproject.toml that it has."""
BUILD = ("setuptools",)
"""What installs our own packages."""
IMAGE = {
    "implementation_name": "cpython",
    "implementation_version": "3.11.13",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.13",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""The images' Python and machine, whichever these are here: what packages need depends on them."""
OF_CUDA = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)$")


def lines(lock: Path) -> dict[str, str]:
    """Return name -> its lines of a lock, without those for another Python or machine than the images'.

    Raises ValueError if two entries of one name are for the images.
    """
    found: dict[str, str] = {}
    for text in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip()):
        if text.startswith("#"):
            continue
        requirement = Requirement(text.splitlines()[0].rstrip(" \\"))
        if requirement.marker and not requirement.marker.evaluate(IMAGE):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            raise ValueError(f"{lock.name} has two entries of {name} for the images' Python")
        found[name] = text
    return found


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


def reported(report: Path) -> dict[str, str]:
    """Return name -> its lines, of what pip says of PyTorch's CUDA build."""
    found = {}
    for one in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = canonicalize_name(one["metadata"]["name"])
        sha256 = one["download_info"]["archive_info"]["hashes"]["sha256"]
        found[name] = f"{name}=={one['metadata']['version']} \\\n    --hash=sha256:{sha256}"
    return found


def cuda(trainer: Path, build: dict[str, str]) -> str:
    """Return the trainer's lock with PyTorch's CUDA build in the place of the other."""
    told = {name: one for name, one in lines(trainer).items() if not OF_CUDA.match(name)}
    told |= {name: one for name, one in build.items() if OF_CUDA.match(name)}
    header = "# What the image of the trainer has with CUDA: CPython 3.11, x86-64. Made by requirements/parts.py.\n"
    return header + "\n".join(told[name] for name in sorted(told)) + "\n"


if __name__ == "__main__":
    for image, text in parts(FOLDER / "cpu.lock").items():
        (FOLDER / f"{image}.lock").write_text(text, encoding="utf-8")
    build = reported(Path(sys.argv[1])) if len(sys.argv) > 1 else lines(FOLDER / "cuda.lock")
    (FOLDER / "cuda.lock").write_text(cuda(FOLDER / "trainer.lock", build), encoding="utf-8")
