"""Each package that pyproject.toml requires is imported somewhere, or is listed here with its reason."""

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("whetstone", "proxy", "judge", "trainer", "migrations", "benchmarks", "tests", "docs", "examples")
NOT_IMPORTED = {
    "adlfs": "loaded by fsspec for az://",
    "gcsfs": "loaded by fsspec for gs://",
    "import-linter": "a command: make check",
    "mypy": "a command: make check",
    "pytest-timeout": "a plugin of pytest",
    "ruff": "a command: make check",
    "uv": "a command: installs and locks",
    "zensical": "a command: make site",
}


def _imported() -> set[str]:
    names: set[str] = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def _required() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return {re.split(r"[\[<>=~; ]", one)[0] for one in listed} - {"whetstone-proxy"}


def test_each_required_package_is_imported_or_has_a_reason() -> None:
    names = _imported()
    imported = {
        distribution.lower().replace("_", "-")
        for module, distributions in packages_distributions().items()
        if module in names
        for distribution in distributions
    }
    imported |= {name.replace("_", "-") for name in names}
    assert _required() - imported == set(NOT_IMPORTED)
