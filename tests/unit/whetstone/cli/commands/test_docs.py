"""`whetstone docs`: the pages that messages name, in the terminal."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from whetstone.cli.commands import docs
from whetstone.cli.main import app

ROOT = Path(__file__).resolve().parents[5]
NAMED = re.compile(r"docs/([a-z_]+)\.md")


def run(*arguments: str, terminal: bool = False) -> Result:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TTY_COMPATIBLE": str(int(terminal))}
    return CliRunner(env=environment).invoke(app, ["docs", *arguments])


def test_it_lists_pages_with_what_they_are_about() -> None:
    pages = {entry["page"]: entry["about"] for entry in json.loads(run("--json").stdout)}
    assert pages["feedback"] == "rewards, thumbs and corrections from code, people and web pages"
    assert len(pages) > 30
    assert "feedback" in run(terminal=True).stdout
    assert max(map(len, run(terminal=True).stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", ["feedback", "feedback.md", "docs/feedback.md"])
def test_a_page_is_shown_by_the_name_that_messages_have(name: str) -> None:
    text = (ROOT / "docs" / "feedback.md").read_text(encoding="utf-8")
    assert run(name).stdout == f"{text}\n"
    rendered = run(name, terminal=True).stdout
    assert "/v1/feedback" in rendered and "```" not in rendered


def test_a_page_that_is_not_there_is_named_with_its_neighbours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(docs.PageMissing, match=r"no page 'feedbak'; did you mean feedback\?"):
        _raise(run("feedbak"))
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    with pytest.raises(docs.PageMissing, match="in the folder docs of Whetstone's repository"):
        _raise(run())


def _raise(result: Result) -> None:
    assert result.exception is not None
    raise result.exception


def test_each_page_that_code_names_exists() -> None:
    programs = ("proxy", "judge", "trainer", "whetstone", "migrations")
    files = [path for name in programs for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".html", ".txt")]
    named = {page for path in files for page in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert named <= {path.stem for path in (ROOT / "docs").glob("*.md")}
