"""What a coding agent reads, the skill and llms.txt: in the format of its kind, and true in every command and URL."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context
from typer.main import get_command

from proxy.domain.address import RECORDED
from tests.docs_blocks import ROOT
from whetstone.cli.main import app

SKILL = ROOT / "docs" / "skills" / "whetstone" / "SKILL.md"
PAGES = (SKILL, ROOT / "docs" / "llms.txt")
ROUTE = re.compile(r"@api\.(get|post|put|delete)\(\s*\"(/[^\"]+)\"")
CALL = re.compile(r"\b(GET|POST|DELETE|PUT) (/[\w./{}-]+)")


def routes() -> set[str]:
    """Return each route of the proxy as `METHOD /path`, with `{}` for what varies."""
    declared = {
        f"{method.upper()} {path}"
        for source in (ROOT / "proxy").rglob("*.py")
        for method, path in ROUTE.findall(source.read_text(encoding="utf-8"))
    }
    return (
        {re.sub(r"\{[^}]+\}", "{}", route) for route in declared}
        | {f"POST {path}" for path in RECORDED}
        | {"GET /openapi.json"}
    )


def commands(text: str) -> Iterator[list[str]]:
    """Return each command line of `whetstone` in code, split into words."""
    in_blocks = re.findall(r"^whetstone [^\n#]+", text, re.MULTILINE)
    for line in in_blocks + re.findall(r"`(whetstone [^`]+)`", text):
        yield shlex.split(line)[1:]


def unknown(words: list[str]) -> str | None:
    """Return what is wrong with a command line: a command or an option that is not there."""
    command: Any = get_command(app)
    rest = list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        context = Context(command)
        if rest[0] not in command.list_commands(context):
            return f"no command {rest[0]}"
        _, command, rest = command.resolve_command(context, rest)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    strange = [word for word in rest if word.startswith("-") and word not in {*options, "--help"}]
    return f"{' '.join(words)}: no option {strange[0]}" if strange else None


def test_the_skill_has_the_front_matter_of_agent_skills() -> None:
    _, front, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = yaml.safe_load(front)
    assert set(fields) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert fields["name"] == SKILL.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 1 <= len(fields["description"]) <= 1024 and not re.search("[<>]", fields["description"])
    assert len(fields["compatibility"]) <= 500
    assert len(body.splitlines()) <= 500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_there_with_its_options(page: Path) -> None:
    lines = list(commands(page.read_text(encoding="utf-8")))
    assert len(lines) >= 3
    assert [wrong for words in lines if (wrong := unknown(words))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_url_is_a_route(page: Path) -> None:
    known = routes()
    text = page.read_text(encoding="utf-8")
    named = {f"{method} {path}" for method, path in CALL.findall(text)}
    named |= {f"GET {path}" for path in re.findall(r"^curl \$url(/\S+)", text, re.MULTILINE)}
    named |= {f"POST /v1{re.sub('{[^}]+}', 'x', path)}" for path in re.findall(r"client\.post\(f?\"([^\"]+)", text)}
    assert len(named) >= 3
    patterns = [re.compile(re.escape(route).replace(r"\{\}", "[^/]+")) for route in known]
    strange = [call for call in named if not any(pattern.fullmatch(call) for pattern in patterns)]
    assert strange == []


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("doctor --log", None),
        ("doctor --lgo", "no option --lgo"),
        ("policies train on", None),
        ("policies tarin on", "no command tarin"),
        ("heal", "no command heal"),
    ],
)
def test_a_wrong_command_is_seen(words: str, wrong: str | None) -> None:
    seen = unknown(words.split())
    assert seen is None if wrong is None else wrong in str(seen)
