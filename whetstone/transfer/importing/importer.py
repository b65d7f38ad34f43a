"""Import a log: read it twice, first to check every line, then to write it, some lines per transaction.

Nothing is written of a file with an invalid line. After an interruption, the same import continues where it stopped:
existing conversations are recognised by their content, so importing the same file twice has no further effect.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Engine

from whetstone.errors import WhetstoneError
from whetstone.transfer.importing.rows import Histories, KeyedEntry, digest
from whetstone.transfer.importing.schema import BadLine, LogEntry, NoAnswer, read_line
from whetstone.transfer.importing.store import prepare, write

AT_ONCE = 200
"""Lines per transaction: tens of milliseconds, so that a proxy on the same SQLite file hardly waits."""
MAX_LINE_BYTES = 64 * 2**20
MAX_PROBLEMS = 10
"""Most invalid lines that are listed; the others are only counted."""


class InvalidLog(WhetstoneError):
    """The file cannot be imported, and no part of it was; the message says which lines are invalid."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
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


def check(options: ImportOptions, progress: Callable[[int], None]) -> Outcome:
    """Check the whole file and return counts of its content.

    Raises:
        InvalidLog: it cannot be read, or a line cannot be imported.
    """
    if options.file.exists() and not options.file.is_file():
        raise InvalidLog(f"{options.file} cannot be read twice: copy its content to a regular file first")
    outcome, bad = Outcome(), 0
    messages: list[str] = []
    for number, line in _lines(options.file):
        outcome.lines += 1
        try:
            some = read_line(line, options.reward_field, options.task)
        except NoAnswer:
            outcome.unanswered += 1
        except BadLine as error:
            bad += 1
            if len(messages) < MAX_PROBLEMS:
                messages.append(f"line {number}: {error}")
        else:
            outcome.conversations += len(some)
            outcome.rewarded += any(one.tags.reward is not None for one in some)
        if outcome.lines % 1000 == 0:
            progress(outcome.lines)
    if bad:
        more = f"\n... and {bad - len(messages)} more" if bad > len(messages) else ""
        raise InvalidLog(
            f"{bad} of {outcome.lines} lines of {options.file} cannot be imported, so nothing was:\n"
            + "\n".join(messages)
            + more
        )
    if not outcome.conversations:
        raise InvalidLog(
            f"{options.file} has no answer to import: {outcome.lines} lines, {outcome.unanswered} without one"
        )
    return outcome


def run(engine: Engine, options: ImportOptions, outcome: Outcome, progress: Callable[[int], None]) -> Outcome:
    """Write the file that `check` has accepted.

    Raises:
        NotImportable: the policy serves apps.
        InvalidLog: the file has changed since the check.
    """
    now, gone = datetime.now(UTC), set[bytes]()
    histories = Histories(options.normalise, options.normalise_timeout_s)
    with engine.begin() as connection:
        prepare(connection, options.project, options.policy, now)
    for number, some in _batches(_keyed_entries(options)):
        with engine.begin() as connection:
            outcome.counted += write(connection, options.project, options.policy, some, now, gone, histories)
        progress(number)
    return outcome


def _keyed_entries(options: ImportOptions) -> Iterator[KeyedEntry]:
    """Yield every conversation with its key; lines with equal content are numbered to keep them apart."""
    seen: Counter[bytes] = Counter()
    for number, line in _lines(options.file):
        try:
            some = read_line(line, options.reward_field, options.task)
        except NoAnswer:
            continue
        except BadLine as error:
            raise InvalidLog(f"{options.file} has changed since it was checked: line {number}: {error}") from error
        key = _key(options.policy, some[0], seen)
        for entry in some:
            tags = replace(entry.tags, no_train=entry.tags.no_train or options.no_train)
            yield KeyedEntry(number, key, replace(entry, tags=tags))


def _key(policy: str, entry: LogEntry, seen: Counter[bytes]) -> str:
    if entry.response_id is not None:
        return digest(policy, "response", entry.response_id)
    content_digest = digest(
        policy, entry.messages, entry.tools, entry.tags.trajectory_id, entry.is_call and entry.sampling
    )
    short = hashlib.blake2b(content_digest.encode(), digest_size=8).digest()
    seen[short] += 1
    return digest(content_digest, seen[short]) if seen[short] > 1 else content_digest


def _batches(entries: Iterator[KeyedEntry]) -> Iterator[tuple[int, Sequence[KeyedEntry]]]:
    """Yield chunks, with the answers of one call together, and the number of the last line."""
    waiting: list[KeyedEntry] = []
    for one in entries:
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
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidLog(f"{path}: line {number} is longer than {MAX_LINE_BYTES // 2**20} MiB")
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield number, text
    except OSError as error:
        raise InvalidLog(f"{path} cannot be read: {error.strerror or error}") from error
