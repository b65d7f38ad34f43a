"""How every program logs: a line each, as text or as JSON, with what it is about. Knows no program, no conversation.

What work is about (a call, a group, a step) is said once, around it (`about`), and stands in every line written
inside, in other programs too where they work on the same thing: that is how one request is followed through all three.
What apps said is in no line. Keys and passwords that slip into one are blotted out here, as the last of several walls.
"""

import json
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

from whetstone.settings import LogSettings

Format = Literal["text", "json"]
Value = str | int | float | list[str] | None

OURS = ("proxy", "judge", "trainer", "migrations", "whetstone")
"""Loggers that `debug` is for."""
QUIET = ("httpx", "httpcore", "celery.worker.strategy", "celery.worker.request", "celery.app.trace", "kombu")
"""Loggers that say something at every look at a server or a queue: from them only warnings."""
TOLD_ALWAYS = ("celery.apps.worker",)
"""Loggers heard from INFO on, whatever the level: that a worker is ready is what `up` waits for."""
SERVERS = ("uvicorn", "uvicorn.error", "uvicorn.access")
"""Loggers with handlers of their own, which are taken from them."""

_SECRETS = re.compile(
    # A password in an address, which may hold anything but blanks and `@`; `:8000/v1/models/a@v1` has none.
    r"(?P<address>://[^/\s:@]*:)(?!\d{1,5}(?![\w@]))[^\s@]+(?=@)"
    r"|(?P<key>\bwsk_[A-Za-z0-9]+_)[A-Za-z0-9_-]+"
    r"|(?P<kind>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|(?P<other>\bsk-)[A-Za-z0-9_-]{8,}"
    r"|(?P<named>\b(?:password|passwd|api_key|apikey|secret)\s*=\s*)[^\s&;,]+",
    re.IGNORECASE,
)
_CUES = ("://", "wsk_", "bearer", "basic", "sk-", "pass", "api_key", "apikey", "secret")
"""Each of those begins with one of these, but for its case. Most lines have none, which is known in no time."""
_NOTHING: Mapping[str, Value] = MappingProxyType({})

_about: ContextVar[Mapping[str, Value]] = ContextVar("about", default=_NOTHING)


class about:  # noqa: N801 - it is said like a word: `with about(step=3):`
    """Have every line that is written inside say what it is about; what is None is not said."""

    __slots__ = ("_fields", "_token")

    def __init__(self, **fields: Value) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = begin(self._fields)

    def __exit__(self, *_error: object) -> None:
        end(self._token)


def begin(fields: Mapping[str, Value]) -> Token[Mapping[str, Value]]:
    """As `about`, until `end`: for what every request passes, which is to cost little."""
    outer = _about.get()
    if outer:  # what is None here must not hide what was said further out
        fields = {**outer, **{name: value for name, value in fields.items() if value is not None}}
    return _about.set(fields)


def end(token: Token[Mapping[str, Value]]) -> None:
    """Say no longer what `begin` gave this for."""
    _about.reset(token)


def hidden(text: str) -> str:
    """The text without the passwords and keys that are in it."""
    told = text.casefold()
    if not any(map(told.__contains__, _CUES)):
        return text
    return _SECRETS.sub(lambda found: f"{found[found.lastgroup or 0]}***", text)


def set_up(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Have everything that this process logs written to `stream` (standard error) in one form; may be called again."""
    handler = _Handler(stream)
    handler.setFormatter(_FORMATTERS[settings.format]())
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    # At DEBUG libraries tell all that they send: prompts, and keys.
    root.setLevel(max(level, logging.INFO))
    for name in OURS:
        logging.getLogger(name).setLevel(level)
    for name in SERVERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in TOLD_ALWAYS:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    logging.captureWarnings(True)
    # No line tells where in the code it was written, or by which thread: to find out takes as long as a line's half.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def line(form: Format, logger: str, message: str) -> str:
    """A line as `set_up` would have it written, for whoever writes into a log of others."""
    record = logging.LogRecord(logger, logging.INFO, "", 0, message, None, None)
    return _FORMATTERS[form]().format(record)


class _Handler(logging.StreamHandler[Any]):
    """The one that `set_up` put there."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = hidden(_on_one_line(record.getMessage()))
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        said = f"{_time(record)} {record.levelname} {record.name}: {message}{f' [{fields}]' if fields else ''}"
        return "\n  ".join([said, *hidden(_stack(self, record)).splitlines()])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": hidden(record.getMessage()),
            **_fields(record),
        }
        if stack := _stack(self, record):
            kind = record.exc_info[0] if record.exc_info else None
            told["exception"] = {"type": kind.__name__ if kind else None, "stack": hidden(stack)}
        return json.dumps(told, default=str)


_FORMATTERS: dict[Format, type[logging.Formatter]] = {"text": _Text, "json": _Json}


def _fields(record: logging.LogRecord) -> Mapping[str, Value]:
    """What the line is about; never in the place of what every line has."""
    reserved = ("time", "level", "logger", "message", "exception")
    return {name: value for name, value in _about.get().items() if value is not None and name not in reserved}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stack(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Where it was raised, and what; empty without an exception."""
    raised = record.exc_info is not None and record.exc_info[0] is not None
    parts = [formatter.formatException(record.exc_info)] if raised and record.exc_info else []
    return "\n".join([*parts, *([formatter.formatStack(record.stack_info)] if record.stack_info else [])])


def _shown(value: Value) -> str:
    return _on_one_line(",".join(value) if isinstance(value, list) else str(value))


def _on_one_line(text: str) -> str:
    """Who chooses an id or a path chooses no line: what would begin one is written out."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
