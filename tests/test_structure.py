"""The folders stay readable: how wide they are, what their files are called, and that the maps in them are true."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("proxy", "judge", "trainer", "migrations", "whetstone")
SOURCE = (*PROGRAMS, "benchmarks", "docs/build")
MOST_FILES = 16
MOST_ALIKE = 2
"""Files of a folder that begin with the same word: three want a folder."""


def folders() -> dict[str, list[Path]]:
    """Each folder of source, with its files."""
    by_folder: dict[str, list[Path]] = {}
    for top in SOURCE:
        for path in sorted((ROOT / top).rglob("*.py")):
            by_folder.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    return by_folder


def packages() -> list[str]:
    return [name for name in folders() if (ROOT / name / "__init__.py").is_file()]


def docstring_of(package: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""


@pytest.mark.parametrize("folder", sorted(set(folders()) - {"migrations/versions"}))
def test_a_folder_is_not_too_wide_and_no_prefix_wants_a_folder(folder: str) -> None:
    names = [path.stem for path in folders()[folder]]
    assert len(names) <= MOST_FILES
    words = Counter(name.split("_")[0] for name in names if not name.startswith("_"))
    assert [word for word, times in words.items() if times > MOST_ALIKE] == []


@pytest.mark.parametrize("package", packages())
def test_a_package_names_only_what_is_in_it(package: str) -> None:
    docstring = docstring_of(package)
    assert docstring, "say what comes in, what it passes, what goes out"
    strange = [
        name
        for name in re.findall(r"`([^`]+)`", docstring)
        if re.fullmatch(r"[a-z_]+", name)
        and not any((ROOT / place / f"{name}{end}").exists() for place in (package, "") for end in ("", ".py"))
    ]
    assert strange == []


@pytest.mark.parametrize("package", packages())
def test_a_package_names_everything_that_is_in_it(package: str) -> None:
    if package in LISTS:
        return
    there = {path.stem for path in folders()[package]} | {
        name.rpartition("/")[2] for name in folders() if name.rpartition("/")[0] == package
    }
    named = set(re.findall(r"`([^`]+)`", docstring_of(package)))
    assert sorted(there - named - {"__init__", "__main__"}) == []


LISTS = {"proxy/dashboard/pages", "proxy/dashboard/queries", "proxy/dashboard/views", "whetstone/cli/commands"} | {
    "whetstone/cli/tables", "trainer/store", "migrations", "whetstone/torch_builds",
}  # fmt: skip
"""Packages whose files are all of one kind, which their docstring says instead of each name."""
