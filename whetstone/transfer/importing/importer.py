"""Import a log: read it twice, first to check every line, then to write it, some lines per transaction.

Nothing is written of a file with an invalid line. After an interruption, the same import continues where it stopped:
existing conversations are recognised by their content, so importing the same file twice has no further effect.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from whetstone.transfer.importing.rows import One
from whetstone.transfer.importing.schema import BadLine, Logged, NoAnswer, read_line
from whetstone.transfer.importing.store import prepare, write
from whetstone.transfer.importing.threads import Histories, digest

AT_ONCE = 200
"""Lines per transaction: tens of milliseconds, so that a proxy on the same SQLite file hardly waits."""
MAX_LINE_BYTES = 64 * 2**20
MAX_PROBLEMS = 10
"""Most invalid lines that are listed; the others are only counted."""


class InvalidLog(Exception):
    """The file cannot be imported, and no part of it was; the message says which lines are invalid."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to import, and how to read its lines."""

    file: Path
    project: str
    policy: str
    reward_field: str = "reward"
    task: str | None = None
    no_train: bool = False
    """The project does not train on anything."""
    normalise: Sequence[str] = ()
    """Setting `proxy.normalise`."""
    normalise_timeout_s: float = 0.05
    """Setting `proxy.normalise_timeout_s`."""


@dataclass(slots=True)
class Outcome:
    """Counts of a file's content and of its import."""

    lines: int = 0
    conversations: int = 0
    rewarded: int = 0
    unanswered: int = 0
    """Calls without an answer."""
    counted: Counter[str] = field(default_factory=Counter)
    """Written `trajectories` and `completions`; conversations that were `there` already, `erased` or `taken`."""


def check(wanted: Wanted, progress: Callable[[int], None]) -> Outcome:
    """Check the whole file and return counts of its content.

    Raises:
        InvalidLog: it cannot be read, or a line cannot be imported.
    """
    if wanted.file.exists() and not wanted.file.is_file():
        raise InvalidLog(f"{wanted.file} is no file that can be read twice: write what it says to one first")
    found, problems = Outcome(), Counter[str]()
    told: list[str] = []
    for number, line in _lines(wanted.file):
        found.lines += 1
        try:
            some = read_line(line, wanted.reward_field, wanted.task)
        except NoAnswer:
            found.unanswered += 1
        except BadLine as error:
            problems["bad"] += 1
            if len(told) < MAX_PROBLEMS:
                told.append(f"line {number}: {error}")
        else:
            found.conversations += len(some)
            found.rewarded += any(one.tags.reward is not None for one in some)
        if found.lines % 1000 == 0:
            progress(found.lines)
    if bad := problems["bad"]:
        more = f"\n... and {bad - len(told)} more" if bad > len(told) else ""
        raise InvalidLog(
            f"{bad} of {found.lines} lines of {wanted.file} cannot be imported, so nothing was:\n"
            + "\n".join(told)
            + more
        )
    if not found.conversations:
        raise InvalidLog(f"{wanted.file} has no answer to import: {found.lines} lines, {found.unanswered} without one")
    return found


def run(engine: Engine, wanted: Wanted, found: Outcome, progress: Callable[[int], None]) -> Outcome:
    """Write what `check` has found.

    Raises:
        NotImportable: the policy serves apps.
        InvalidLog: the file has changed since the check.
    """
    now = datetime.now(UTC)
    with engine.begin() as connection:
        prepare(connection, wanted.project, wanted.policy, now)
    gone: set[bytes] = set()
    histories = Histories(wanted.normalise, wanted.normalise_timeout_s)
    for number, some in _some(_ones(wanted)):
        with engine.begin() as connection:
            found.counted += write(connection, wanted.project, wanted.policy, some, now, gone, histories)
        progress(number)
    return found


def _ones(wanted: Wanted) -> Iterator[One]:
    """Yield every conversation with its key; lines with equal content are numbered to keep them apart."""
    seen: Counter[bytes] = Counter()
    for number, line in _lines(wanted.file):
        try:
            some = read_line(line, wanted.reward_field, wanted.task)
        except NoAnswer:
            continue
        except BadLine as error:
            raise InvalidLog(f"{wanted.file} has changed since it was checked: line {number}: {error}") from error
        key = _key(wanted.policy, some[0], seen)
        for logged in some:
            tags = replace(logged.tags, no_train=logged.tags.no_train or wanted.no_train)
            yield One(number, key, replace(logged, tags=tags))


def _key(policy: str, logged: Logged, seen: Counter[bytes]) -> str:
    if logged.response_id is not None:
        return digest(policy, "response", logged.response_id)
    said = digest(policy, logged.messages, logged.tools, logged.tags.trajectory_id, logged.is_call and logged.sampling)
    short = hashlib.blake2b(said.encode(), digest_size=8).digest()
    seen[short] += 1
    return digest(said, seen[short]) if seen[short] > 1 else said


def _some(ones: Iterator[One]) -> Iterator[tuple[int, Sequence[One]]]:
    """Yield chunks, with the answers of one call together, and the number of the last line."""
    waiting: list[One] = []
    for one in ones:
        if len(waiting) >= AT_ONCE and waiting[-1].place != one.place:
            yield waiting[-1].place, waiting
            waiting = []
        waiting.append(one)
    if waiting:
        yield waiting[-1].place, waiting


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines with their numbers."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidLog(f"{path}: line {number} is longer than {MAX_LINE_BYTES // 2**20} MiB")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InvalidLog(f"{path} cannot be read: {error.strerror or error}") from error
