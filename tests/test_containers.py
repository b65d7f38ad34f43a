"""The containers' recipes, read as far as they can be without an engine: who runs, from what, with what inside."""

import json
import re
import shlex
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))
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


def all_of(recipe: list[Instruction], word: str) -> list[str]:
    return [one.text for one in recipe if one.word == word]


def final(recipe: list[Instruction]) -> list[Instruction]:
    """What the image itself is made by, its build's stages left out."""
    last = max(place for place, one in enumerate(recipe) if one.word == "FROM")
    return recipe[last:]


@pytest.fixture(params=RECIPES, ids=lambda path: path.name)
def recipe(request: pytest.FixtureRequest) -> list[Instruction]:
    return read(request.param)


def test_there_is_one_for_serving_and_one_for_training() -> None:
    assert [path.name for path in RECIPES] == ["server.Dockerfile", "trainer.Dockerfile"]


def test_it_runs_as_nobody_that_may_do_more_by_a_fixed_number(recipe: list[Instruction]) -> None:
    (user,) = all_of(final(recipe), "USER")
    uid, gid = map(int, user.split(":"))
    assert uid >= 10_000 and gid >= 10_000
    after = [one.word for one in final(recipe)]
    assert not {"RUN", "COPY"} & set(after[after.index("USER") :])


def test_its_base_is_pinned_to_a_release(recipe: list[Instruction]) -> None:
    bases = [text.split()[0] for text in all_of(recipe, "FROM")]
    assert bases and all(re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", base) for base in bases)


def test_nothing_is_fetched_but_by_hash(recipe: list[Instruction]) -> None:
    assert all_of(recipe, "ADD") == []
    commands = [json.loads(text) for text in all_of(recipe, "RUN")]
    assert not any(word in ("curl", "wget", "git", "apt-get") for command in commands for word in command)
    installs = [command for command in commands if "install" in command and "pip" in command]
    assert all("--no-deps" in one for one in installs)
    assert [("--require-hashes" in one, one[-1]) for one in installs] == [(True, "requirements/cpu.lock"), (False, ".")]


def test_no_shell_stands_between_the_engine_and_the_program(recipe: list[Instruction]) -> None:
    told = [one.text for one in recipe if one.word in EXEC]
    told += [text.split("CMD", 1)[1] for text in all_of(recipe, "HEALTHCHECK")]
    for text in told:
        command = json.loads(text)
        assert command[0] not in ("sh", "bash", "/bin/sh", "/bin/bash")
    assert all_of(recipe, "ENTRYPOINT") == [] and all_of(recipe, "SHELL") == []


def test_it_says_how_it_is(recipe: list[Instruction]) -> None:
    (check,) = all_of(final(recipe), "HEALTHCHECK")
    assert all(option in check for option in ("--interval=", "--timeout=", "--start-period=", "--retries="))


def test_no_secret_is_baked_in(recipe: list[Instruction]) -> None:
    told = [word for name in ("ENV", "ARG", "LABEL") for text in all_of(recipe, name) for word in shlex.split(text)]
    assert told and not [word for word in told if SECRET.search(word)]


def test_what_it_runs_is_there(recipe: list[Instruction]) -> None:
    (text,) = all_of(final(recipe), "CMD")
    command = json.loads(text)
    module = command[command.index("-m" if "-m" in command else "-A") + 1]
    assert find_spec(f"{module}.__main__" if "-m" in command else module) is not None


def test_what_it_copies_is_there_and_not_held_back(recipe: list[Instruction]) -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert ignored[0] == "*"
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    copied = [source for text in all_of(recipe, "COPY") if "--from" not in text for source in text.split()[:-1]]
    assert set(copied) == set(allowed)
    assert all((ROOT / source).exists() for source in copied)
    held_back = (".git", ".env", "data", ".venv", "whetstone.toml", "tests")
    assert not [name for name in held_back for one in allowed if fnmatch(name, one) or one.startswith(f"{name}/")]


def test_the_packages_of_ours_are_all_in_it(recipe: list[Instruction]) -> None:
    copied = {source for text in all_of(recipe, "COPY") if "--from" not in text for source in text.split()[:-1]}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"} - copied <= {
        "benchmarks"
    }
