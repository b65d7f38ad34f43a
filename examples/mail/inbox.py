"""An inbox behind SQLite's full-text search, what an agent may do with it, and what an attempt is worth.

Both forms of the example use it: `small_mail` by short commands, `full_mail` by tools.

- A mail can be read only after a search has listed it. A list has subjects and senders, no bodies.
- An attempt never learns whether its answer is right.
- A call that is not valid raises `InvalidCall`, costs a tenth, and changes nothing.
"""

import re
import sqlite3
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "eval"]
Message = dict[str, Any]

MOST_ERRORS = 5
"""Invalid calls that cost something."""
MOST_WORDS = 16
"""Longest query."""


@dataclass(frozen=True)
class Mail:
    """A mail. The higher its day, the newer it is."""

    id: str
    day: int
    sender: str
    subject: str
    body: str


@dataclass(frozen=True)
class Case:
    """An inbox, a question that one of its mails answers, and the bounds of an attempt."""

    mails: tuple[Mail, ...]
    owner: str
    """Who wants to know."""
    question: str
    answer: str
    source: str
    """Id of the mail that has the answer."""
    turns: int
    """Most turns of an attempt."""
    listed: int
    """Most mails that a search lists."""


class InvalidCall(Exception):
    """A call that cannot be carried out; the message says why."""


class Inquiry:
    """One attempt at a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.turns, self.errors = case, 0, 0
        self.listed: set[str] = set()
        self.opened: list[str] = []
        """Ids of the mails that were read, in order."""
        self.final: tuple[str, list[str]] | None = None
        """The answer and its sources."""
        self._mails = {mail.id: mail for mail in case.mails}
        self._tools: dict[str, Callable[..., Any]] = {
            "search_inbox": self._search,
            "read_email": self._read,
            "return_final_answer": self._answer,
        }
        self._db = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._db.close)
        self._db.execute("CREATE VIRTUAL TABLE mails USING fts5(id UNINDEXED, day UNINDEXED, sender, subject, body)")
        rows = [(mail.id, mail.day, mail.sender, mail.subject, mail.body) for mail in case.mails]
        self._db.executemany("INSERT INTO mails VALUES (?, ?, ?, ?, ?)", rows)

    @property
    def is_over(self) -> bool:
        return self.final is not None or self.turns >= self.case.turns

    def use(self, tool: str, arguments: Any) -> Any:
        """Use a tool: `search_inbox` returns mails, `read_email` a mail, `return_final_answer` None.

        Raises:
            InvalidCall: there is no such tool, or it does not take these arguments.
        """
        try:
            if tool not in self._tools:
                raise InvalidCall("there is no such tool")
            if not isinstance(arguments, dict):
                raise InvalidCall("the arguments are no JSON object")
            try:
                return self._tools[tool](**arguments)
            except TypeError:
                raise InvalidCall("wrong arguments") from None
        except InvalidCall:
            self.errors += 1
            raise

    def _search(self, query: str) -> list[Mail]:
        """Return the newest mails that have every word of the query."""
        words = re.findall(r"\w+", query) if isinstance(query, str) else []
        if not 1 <= len(words) <= MOST_WORDS:
            raise InvalidCall(f"the query has no word, or more than {MOST_WORDS}")
        rows = self._db.execute(
            "SELECT id FROM mails WHERE mails MATCH ? ORDER BY day DESC, id LIMIT ?",
            (" ".join(f'"{word}"' for word in words), self.case.listed),
        )
        mails = [self._mails[name] for (name,) in rows]
        self.listed |= {mail.id for mail in mails}
        return mails

    def _read(self, id: str) -> Mail:  # noqa: A002 - the name of the tool's argument
        name = str(id)
        if name not in self.listed:
            raise InvalidCall("no search has listed this mail")
        self.opened.append(name)
        return self._mails[name]

    def _answer(self, answer: str, sources: list[str]) -> None:
        if not isinstance(answer, str) or not isinstance(sources, list):
            raise InvalidCall("the answer is a text, the sources are a list")
        self.final = answer, [str(source) for source in sources]

    @property
    def answer_is_right(self) -> bool:
        return self.final is not None and plain(self.final[0]) == plain(self.case.answer)

    @property
    def source_is_right(self) -> bool:
        return self.final is not None and set(self.final[1]) == {self.case.source}

    def solved(self) -> bool:
        """Return whether answer and source are right."""
        return self.answer_is_right and self.source_is_right

    def reward(self) -> float:
        """Return what the attempt is worth, from -1 to 1.1.

        0.1 if a search listed the right mail, 0.2 if it was read, 0.2 if it alone is the source, 0.5 if the answer is
        right; if all is right, up to 0.1 for the turns that were left. Each of five invalid calls costs 0.1, an attempt
        without an answer 0.5.
        """
        case = self.case
        progress = 0.1 * (case.source in self.listed) + 0.2 * (case.source in self.opened)
        outcome = 0.2 * self.source_is_right + 0.5 * self.answer_is_right - 0.5 * (self.final is None)
        speed = 0.1 * (1 - self.turns / case.turns) * self.solved()
        return progress + outcome + speed - 0.1 * min(self.errors, MOST_ERRORS)


def plain(text: str) -> str:
    """Return a text without what does not count in an answer: letter case, punctuation, commas in numbers."""
    return " ".join(re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d)", "", text.casefold())))
