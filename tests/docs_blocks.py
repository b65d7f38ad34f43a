"""The fenced blocks of README and docs: where they stand, in which language, and why one is not run. Runs nothing."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITTEN_THERE = "http://127.0.0.1:8000"
"""The proxy's address in every page."""
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^ *(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- not run: (?P<why>[^\n]+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str
    why_not: str | None
    """What `<!-- not run: … -->` right above it says."""

    @property
    def place(self) -> str:
        """Page and line, as an editor opens them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page a user may read."""
    patterns = ("README.md", "SECURITY.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/README.md")
    return sorted(page for pattern in patterns for page in ROOT.glob(pattern))


def blocks(page: Path) -> Iterator[Block]:
    """In order."""
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        mark = _MARK.search(before)
        body = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        yield Block(page, before.count("\n") + 1, fence["language"], body, mark["why"] if mark else None)
