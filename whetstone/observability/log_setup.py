"""Configure logging for every program: one line per record, as text or as JSON, with the ids of what it is about.

What work is about (a call, a group, a step) is set once around it (`about`) and appears in every line written inside,
also in other programs that work on the same thing: so one request can be followed through all three.

No line contains the content of calls. Keys and passwords that slip into a line are masked here, as the last of several
safeguards.
"""

import json
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

from whetstone.config.settings import LogSettings

Format = Literal["text", "json"]
Value = str | int | float | list[str] | None

OURS = ("proxy", "judge", "trainer", "migrations", "whetstone")
"""Loggers to which `debug` applies."""
QUIET = ("httpx", "httpcore", "celery.worker.strategy", "celery.worker.request", "celery.app.trace", "kombu")
"""Loggers that write a line at every poll of a server or queue; only their warnings are logged."""
ALWAYS_LOGGED = ("celery.apps.worker", "trainer.launcher.ready")
"""Loggers that log from INFO on at every level: `up` waits for the line that a worker, or the launcher, is ready."""
SERVERS = ("uvicorn", "uvicorn.error", "uvicorn.access")
"""Loggers whose own handlers are removed."""

_SECRETS = re.compile(
    # A password in a URL: any characters but blanks and `@`; `:8000/v1/models/a@v1` has none.
    r"(?P<address>://[^/\s:@]*:)(?!\d{1,5}(?![\w@]))[^\s@]+(?=@)"
    r"|(?P<key>\bwsk_[A-Za-z0-9]+_)[A-Za-z0-9_-]+"
    r"|(?P<kind>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|(?P<other>\b(?:sk-|wft_))[A-Za-z0-9_-]{8,}"
    r"|(?P<named>\b(?:password|passwd|api_key|apikey|secret)\s*=\s*)[^\s&;,]+",
    re.IGNORECASE,
)
_CUES = ("://", "wsk_", "wft_", "bearer", "basic", "sk-", "pass", "api_key", "apikey", "secret")
"""Each of these patterns begins with one of these strings, ignoring case. Most lines contain none: a quick check."""
_NOTHING: Mapping[str, Value] = MappingProxyType({})

FIELDS: ContextVar[Mapping[str, Value]] = ContextVar("fields", default=_NOTHING)
"""What every line is about: `about` adds to it."""


class about:  # noqa: N801 - reads like a keyword: `with about(step=3):`
    """Adds fields to every line that is logged inside; None values are omitted."""

    __slots__ = ("_fields", "_token")

    def __init__(self, **fields: Value) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        # A None here must not hide an outer value.
        given = {name: value for name, value in self._fields.items() if value is not None}
        self._token = FIELDS.set({**FIELDS.get(), **given})

    def __exit__(self, *_error: object) -> None:
        FIELDS.reset(self._token)


def hidden(text: str) -> str:
    """Return the text with passwords and keys masked."""
    folded = text.casefold()
    if not any(map(folded.__contains__, _CUES)):
        return text
    return _SECRETS.sub(lambda match: f"{match[match.lastgroup or 0]}***", text)


def set_up(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Write everything that this process logs to `stream` (standard error) in one format. May be called repeatedly."""
    handler = _Handler(stream)
    handler.setFormatter(_FORMATTERS[settings.format]())
    root = logging.getLogger()
    root.handlers = [one for one in root.handlers if not isinstance(one, _Handler)]
    root.addHandler(handler)
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    # At DEBUG, libraries log everything that they send: prompts, and keys.
    root.setLevel(max(level, logging.INFO))
    levels = {
        **dict.fromkeys(OURS, level),
        **dict.fromkeys(QUIET, max(level, logging.WARNING)),
        **dict.fromkeys(ALWAYS_LOGGED, min(level, logging.INFO)),
    }
    for name, its_level in levels.items():
        logging.getLogger(name).setLevel(its_level)
    for logger in map(logging.getLogger, SERVERS):
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(True)
    # Do not determine the source line or the thread of a record: that takes half of the time of a line.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def line(form: Format, logger: str, message: str) -> str:
    """Format a line as `set_up` would, for writing into another program's log."""
    return _FORMATTERS[form]().format(logging.LogRecord(logger, logging.INFO, "", 0, message, None, None))


class _Handler(logging.StreamHandler[Any]):
    """Marks the handler that `set_up` added."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = hidden(_on_one_line(record.getMessage()))
        fields = " ".join(f"{name}={_shown(value)}" for name, value in _fields(record).items())
        first_line = f"{_time(record)} {record.levelname} {record.name}: {message}{f' [{fields}]' if fields else ''}"
        return "\n  ".join([first_line, *hidden(_stack(self, record)).splitlines()])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": hidden(record.getMessage()),
            **_fields(record),
        }
        if stack := _stack(self, record):
            kind = record.exc_info[0] if record.exc_info else None
            entry["exception"] = {"type": kind.__name__ if kind else None, "stack": hidden(stack)}
        return json.dumps(entry, default=str)


_FORMATTERS: dict[Format, type[logging.Formatter]] = {"text": _Text, "json": _Json}


def _fields(record: logging.LogRecord) -> Mapping[str, Value]:
    """Return the fields of `about`, except names that every line already uses."""
    reserved = ("time", "level", "logger", "message", "exception")
    return {name: value for name, value in FIELDS.get().items() if value is not None and name not in reserved}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stack(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback and stack of the record; empty without an exception."""
    raised = record.exc_info is not None and record.exc_info[0] is not None
    parts = [formatter.formatException(record.exc_info)] if raised and record.exc_info else []
    return "\n".join([*parts, *([formatter.formatStack(record.stack_info)] if record.stack_info else [])])


def _shown(value: Value) -> str:
    return _on_one_line(",".join(value) if isinstance(value, list) else str(value))


def _on_one_line(text: str) -> str:
    """Escape unprintable characters: an id or a path chosen by a client must not start a new line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
