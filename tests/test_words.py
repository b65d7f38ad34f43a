"""Names, docstrings, comments and pages use the field's words: few of a list of riddles, and fewer with time."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.build.__main__ import pages as generated_pages
from tests.docs_blocks import pages

ROOT = Path(__file__).resolve().parents[1]
LINES_PER_WORD = 400
"""A program may use one of the words in so many lines of source."""

WORDS = {
    "proxy": 0,
    "whetstone": 0,
    "trainer": 0,
    "judge": 0,
    "migrations": 0,
    "benchmarks": 0,
    "docs/build": 0,
    "tests": 2650,
}
"""Most uses in each program that has more than one in LINES_PER_WORD lines. Only to be lowered."""
CLASSES = {"proxy": 0, "whetstone": 0, "trainer": 0, "judge": 0, "migrations": 0, "benchmarks": 0, "tests": 24}
"""Most classes that are named by a participle or pronoun; also only lowered."""
PAGE_WORDS = 160
"""Most uses in all pages that are written by hand; also only lowered."""

_LISTED = "told|heard|kept|spoke|spoken|asked|said|found|held|nobody|somebody|whoever|ones|anew|likewise"
_IN_PROSE = re.compile(rf"(?<!`)\b(?:{_LISTED}|of it)\b(?!`)", re.IGNORECASE)
_IN_NAME = re.compile(rf"(?<![a-z])(?:{_LISTED})(?![a-z])", re.IGNORECASE)

FIELD_TERMS = re.compile(r"held[ _-]?out|not[ _-]?found", re.IGNORECASE)
CONTRACTS = frozenset(
    {
        "asked_at", "close_asked_at", "judge_asked_at", "step_asked", "step_asked_at",  # columns
        "kept_calls",  # a setting
        "FileNotFoundError", "ModuleNotFoundError", "NotFound",  # Python's, and HTTP's 404
    }
)  # fmt: skip
"""Names that people and other programs rely on."""

_PRONOUNS = re.compile(
    "Around|Became|Begun|Both|Bound|Broken|Built|Chosen|Done|Drawn|Each|Found|Given|Gone|Heard|Held|Here|It|Kept|Known"
    "|Led|Left|Lost|Made|Nobody|One|Ones|Others?|Said|Same|Seen|Sent|Shown|Somebody|Spoken|Such|Taken|That|There|These"
    "|They|Those|Told|What|Which|Who|Whoever|Written"
)
"""Pronouns, adverbs and irregular participles."""
_NO_PARTICIPLES = frozenset({"Embed", "Feed", "Need", "Seed", "Speed"})
_API_VALUES = frozenset({"Enabled", "Disabled"})
"""Classes named after the value that an API's field has."""


def sources(program: str) -> list[Path]:
    return sorted(path for path in (ROOT / program).rglob("*.py") if path != Path(__file__))


def prose_words(text: str) -> list[str]:
    """Return the listed words of a docstring, a comment or a page."""
    return _IN_PROSE.findall(FIELD_TERMS.sub("", text))


_NAMED_BY = {
    kind: [field for field in kind._fields if field in ("id", "attr", "arg", "name", "asname")]
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
"""Kinds of nodes -> their fields that are names: of what they define, read or pass."""


def _names(node: ast.AST) -> Iterator[str]:
    """Return the names that a node itself has."""
    for field in _NAMED_BY[type(node)]:
        name = getattr(node, field)
        if isinstance(name, str):
            yield name
    if isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def comments(text: str) -> list[str]:
    """Return the comments; a text in which no listed word follows a `#` is not taken apart, which is slow."""
    if not any(_IN_PROSE.search(line.partition("#")[2]) for line in text.splitlines()):
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def name_words(tree: ast.AST) -> list[str]:
    """Return the names that contain a listed word, once for each use."""
    return [
        name
        for node in ast.walk(tree)
        for name in _names(node)
        if name not in CONTRACTS and _IN_NAME.search(FIELD_TERMS.sub("", name))
    ]


def source_words(text: str, tree: ast.Module) -> list[str]:
    """Return the listed words in the names, docstrings and comments of a module."""
    docstrings = [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return name_words(tree) + [word for prose in docstrings + comments(text) for word in prose_words(prose)]


def is_participle(name: str) -> bool:
    """Return whether a class name is one past participle or pronoun."""
    bare = name.lstrip("_")
    if not re.fullmatch(r"[A-Z][a-z]+", bare) or bare in _NO_PARTICIPLES | _API_VALUES:
        return False
    return bare.endswith("ed") or bool(_PRONOUNS.fullmatch(bare))


def classes(program: str) -> Iterator[tuple[str, str]]:
    for path in sources(program):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                yield str(path.relative_to(ROOT)), node.name


@pytest.mark.parametrize("program", WORDS)
def test_a_program_uses_few_of_the_listed_words(program: str) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sources(program)}
    words = {str(path.relative_to(ROOT)): source_words(text, parsed(path)) for path, text in texts.items()}
    lines = sum(text.count("\n") for text in texts.values())
    most = max(WORDS[program], lines // LINES_PER_WORD)
    worst = sorted(words.items(), key=lambda entry: -len(entry[1]))[:10]
    uses = sum(map(len, words.values()))
    assert uses <= most, f"{uses} uses, {most} allowed; most of them in {dict(worst)}"


@pytest.mark.parametrize("program", CLASSES)
def test_a_class_is_named_after_a_thing(program: str) -> None:
    named = [f"{path}: {name}" for path, name in classes(program) if is_participle(name)]
    assert len(named) <= CLASSES[program], named


def test_pages_use_few_of_the_listed_words() -> None:
    log = ROOT / "docs" / "log"
    named = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    by_hand = [page for page in named if page.name not in generated_pages() and not page.is_relative_to(log)]
    words = {str(page.relative_to(ROOT)): prose_words(page.read_text(encoding="utf-8")) for page in by_hand}
    uses = sum(map(len, words.values()))
    assert uses <= PAGE_WORDS, {page: found for page, found in words.items() if found}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("asked = told_by(kept)", ["asked", "told_by", "kept"]),
        ("held_out = groups.close_asked_at", []),
        ("hosted = FileNotFoundError", []),
        ('def run():\n    """Nobody is told."""  # said anew', ["Nobody", "told", "said", "anew"]),
        ('row = f"{self.kept}"', ["kept"]),
        ('row = "told"', []),
    ],
)
def test_words_are_counted_in_names_docstrings_and_comments(text: str, words: list[str]) -> None:
    assert sorted(source_words(text, ast.parse(text))) == sorted(words)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Held", True), ("_Counted", True), ("One", True), ("GroupLease", False), ("PromptRejected", False),
        ("Speed", False), ("Enabled", False), ("Settings", False),
    ],
)  # fmt: skip
def test_a_participle_is_no_noun(name: str, is_one: bool) -> None:
    assert is_participle(name) == is_one
