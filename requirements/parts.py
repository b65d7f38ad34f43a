"""Write the locks of the images without CUDA: what each of them needs of cpu.lock, and no more. Called by `make lock`.

Reads what the packages of this environment say they need. The locks with CUDA are cuda.py's.
"""

import re
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
HOST = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
"""The machine that every lock is for, as markers see it, whichever this one is."""
IMAGE = HOST | {"implementation_version": "3.11.13", "python_full_version": "3.11.13", "python_version": "3.11"}
"""That machine with the images' Python: what packages need depends on both."""


def entries(lock: Path) -> list[str]:
    """Return the entries of a lock, each with its hashes."""
    texts = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip())
    return [text for text in texts if not text.startswith("#")]


def lines(lock: Path) -> dict[str, str]:
    """Return name -> its lines of a lock, without those for another Python or machine than the images'.

    Raises ValueError if two entries of one name are for the images.
    """
    found: dict[str, str] = {}
    for text in entries(lock):
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


if __name__ == "__main__":
    for image, text in parts(FOLDER / "cpu.lock").items():
        (FOLDER / f"{image}.lock").write_text(text, encoding="utf-8")
