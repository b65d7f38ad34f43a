"""Every fenced block of README and docs is run here, or says above it why not: `<!-- not run: reason -->`.

Settings and JSON are read as the programs read them; Python, shell and SQL run against a whole stack with a real vLLM,
page by page, in their order: the blocks of a page share Python's names, and no shell's variables.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import Context
from typer.main import get_command

from benchmarks.kit.process import borrowed_vllm
from tests.docs_blocks import ROOT, WRITTEN_THERE, Block, blocks, pages
from tests.e2e.test_stack import up
from whetstone.cli.main import app
from whetstone.config.settings import STARTER, load

SHELL, STACK = ("sh", "bash"), ("python", "sh", "bash", "sql")
READ = ("toml", "json")
OUTPUT = "text"
"""The language of what a program printed; nothing to run."""
LAST = ("docs/keys.md",)
"""Pages that change what others rely on: from the first key on, every call needs one."""


def of_pages(*languages: str) -> dict[Path, list[Block]]:
    """Blocks to run in these languages, by page."""
    by_page = {page: [one for one in blocks(page) if one.language in languages and not one.why_not] for page in pages()}
    return {page: listed for page, listed in by_page.items() if listed}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        known = block.language in (*STACK, *READ, OUTPUT)
        assert known or block.why_not, f"{block.place}: nothing runs {block.language or 'a block without language'!r}"


SETTINGS = [block for listed in of_pages("toml").values() for block in listed]


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.place)
def test_settings_in_pages_are_settings(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "whetstone.toml"
    file.write_text(block.text, encoding="utf-8")
    load(file, environment={})


@pytest.mark.parametrize(
    "block", [block for block in SETTINGS if "[judges." in block.text], ids=lambda block: block.place
)
def test_no_page_has_the_starter_judge(block: Block, tmp_path: Path) -> None:
    """It can compare nothing: `base` needs another model than the default one."""
    file = tmp_path / "whetstone.toml"
    file.write_text(block.text, encoding="utf-8")
    settings = load(file, environment={})
    names = {settings.policy, "starter", *(["base"] if settings.model == str(STARTER) else [])}
    judging = {name: judge.model for name, judge in settings.judges.items()}
    assert judging and not {name for name, model in judging.items() if model.removeprefix("openai/") in names}


@pytest.mark.parametrize("page", of_pages("json"), ids=named)
def test_json_in_pages_is_json(page: Path) -> None:
    for block in of_pages("json")[page]:
        # An object over several lines, or one in each.
        lines = [block.text] if block.text.startswith(("{\n", "[\n")) else block.text.splitlines()
        assert lines and all(isinstance(json.loads(line), dict | list) for line in lines), block.place


@pytest.mark.parametrize("page", pages(), ids=named)
def test_commands_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    words = set(get_command(app).list_commands(Context(get_command(app))))
    assert set(re.findall(r"(?:`|^|\$ )whetstone ([a-z]+)", text, re.MULTILINE)) <= words


@pytest.mark.parametrize("page", pages(), ids=named)
def test_no_page_installs_the_package_that_is_called_whetstone(page: Path) -> None:
    """On the public index that name belongs to another project; ours is whetstone-proxy."""
    assert not re.search(r"pip install (?:[^\n`]*[ \"'])?whetstone(?![\w-])", page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, vllm_url: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder in which `data` is a running stack's, in front of the vLLM of all tests; and its addresses."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("examples", "whetstone"):
        (folder / name).symlink_to(ROOT / name)
    # Adapters that the pages load must not stay: other tests load theirs under the same names.
    with borrowed_vllm(vllm_url), up(folder / "data", WHETSTONE_VLLM__URLS=json.dumps([vllm_url])) as (_, addresses):
        yield folder, addresses


RUN = sorted(of_pages(*STACK), key=lambda page: (named(page) in LAST, page))
LONG = ("examples/tictactoe/README.md", "examples/thumbs/README.md")
"""Pages whose blocks play games: `make test-all`."""


@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long(part="stacks")) if named(page) in LONG else page for page in RUN],
    ids=named,
)
def test_a_page_does_what_it_says(page: Path, stack: tuple[Path, dict[str, Any]]) -> None:
    folder, addresses = stack
    program = folder / "page.py"
    lines = [PRELUDE.format(path=os.pathsep.join((str(Path(sys.executable).parent), os.defpath)))]
    for block in of_pages(*STACK)[page]:
        text = block.text.replace(WRITTEN_THERE, addresses["proxy"])
        kind = "shell" if block.language in SHELL else block.language
        lines.append(f"{kind}({text!r}, {block.place!r})")
    program.write_text("\n".join(lines), encoding="utf-8")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OPENAI_AGENTS_DISABLE_TRACING": "true", "NO_COLOR": "1"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr


PRELUDE = """
import os, re, subprocess, sys

os.environ["PATH"] = {path!r}
names = {{"__name__": "__main__"}}


def python(text, place):
    print("##", place, flush=True)
    exec(compile(text, place, "exec"), names)


def shell(text, place):
    print("##", place, flush=True)
    # A refusal is a failure, though curl takes it for an answer.
    curl = 'curl() {{ command curl --silent --show-error --fail-with-body "$@"; }}; '
    subprocess.run(["bash", "-euo", "pipefail", "-c", curl + text], check=True, stdin=subprocess.DEVNULL)


def sql(text, place):
    print("##", place, flush=True)
    from whetstone.cli.tables.sql_query import asking
    from whetstone.config.settings import STARTER, load

    # Comments may stand behind the last statement, and hold what ends one.
    for statement in filter(str.strip, re.sub("--[^\\n]*", "", text).split(";")):
        with asking(load(environment={{}}).database_url, statement) as (_, rows):
            list(rows)
"""
