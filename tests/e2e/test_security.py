"""What is kept from logs and errors, tried and read: words of conversations, keys. And whether SECURITY.md is true."""

import ast
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from whetstone.database.engine import connect

ROOT = Path(__file__).parents[2]
PROGRAMS = ("proxy", "judge", "trainer", "migrations", "whetstone")
SAID = "a word nobody else is to read"
CONTENT = {
    "body", "comment", "completion", "content", "conversation", "data", "database_url", "demonstration", "headers",
    "messages", "metadata", "password", "prompt", "response", "response_text", "secret", "text", "broker", "api_key",
    "authorization",
}  # fmt: skip
"""Names of what holds words of apps, or keys."""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}

log = logging.getLogger(__name__)


@pytest.mark.parametrize("missing", ["call_id", "status"])
def test_a_completion_that_is_refused_is_quoted_nowhere(
    engine: Engine, seed: Any, logged: Callable[[], list[dict[str, Any]]], missing: str
) -> None:
    seed.trajectory("t", turns=0)
    row = {"new_messages": [{"role": "user", "content": SAID}], "response_text": SAID, missing: None}
    with pytest.raises(DBAPIError) as caught:
        seed.completion("t", 0, **row)
    error = caught.value
    log.error("refused", exc_info=error)
    (line,) = [line for line in logged() if line["logger"] == __name__]
    assert missing in str(error), "the error still says what was wrong"
    assert SAID not in f"{error!r} {error} {error.args} {error.orig!r} {line}"


@pytest.mark.stack
def test_a_value_that_is_no_number_is_quoted_nowhere(postgres: str) -> None:
    engine = connect(postgres.format("postgres"))
    with pytest.raises(DBAPIError) as caught, engine.connect() as connection:
        connection.execute(text("SELECT CAST(:said AS integer)"), {"said": SAID})
    engine.dispose()
    assert "invalid input syntax" in str(caught.value) and SAID not in f"{caught.value!r} {caught.value}"


@pytest.mark.stack
def test_the_password_of_a_database_that_refuses_it_is_not_told(postgres: str) -> None:
    engine = connect(re.sub(r"//[^@/]*@", "//nobody:hunter2@", postgres.format("postgres")))
    with pytest.raises(DBAPIError) as caught, engine.connect():
        pass
    assert "hunter2" not in f"{caught.value!r} {caught.value} {engine!r}"


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every line that our programs log, with its place."""
    for path in (path for program in PROGRAMS for path in sorted((ROOT / program).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr in LEVELS and isinstance(node, ast.Call):
                of = called.value
                if isinstance(of, ast.Name) and of.id in ("log", "logger", "logging"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def named(node: ast.AST) -> set[str]:
    """The names of what a line says: variables, attributes, keys; what is only counted is not said."""
    names: set[str] = set()
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id in ("len", "type"):
            continue
        if isinstance(one, ast.Name):
            names.add(one.id)
        elif isinstance(one, ast.Attribute):
            names.add(one.attr)
        elif isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant):
            names.add(str(one.slice.value))
        names |= named(one)
    return names


def test_no_line_of_a_log_says_what_holds_words_or_keys() -> None:
    calls = list(log_calls())
    assert len(calls) > 50, "it looks at the wrong files"
    assert {place: said for place, call in calls if (said := named(call) & CONTENT)} == {}


def test_nobody_sets_up_logs_but_logs() -> None:
    found = [
        path.name
        for program in PROGRAMS
        for path in sorted((ROOT / program).rglob("*.py"))
        if re.search(r"basicConfig|addHandler|dictConfig", path.read_text(encoding="utf-8"))
    ]
    assert found == ["log_setup.py"]


def test_what_the_threat_model_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", page)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
    words = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", page)) <= words


def test_every_package_of_every_lock_is_held_to_a_hash() -> None:
    locks = sorted((ROOT / "requirements").glob("*.lock"))
    assert len(locks) >= 4
    for lock in locks:
        pieces = re.split(r"\n(?=[A-Za-z0-9])", lock.read_text(encoding="utf-8"))
        packages = [piece for piece in pieces if re.match(r"[A-Za-z0-9._-]+(\[.*\])?==", piece)]
        assert packages and all("--hash=sha256:" in piece for piece in packages), lock.name
