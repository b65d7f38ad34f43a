"""Write a settings file in which each line is explained: by the description of its setting.

`text` is pure; `write` puts it in place only if the loader accepts it, in one move.
"""

import json
import os
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whetstone.config.rewards import Section
from whetstone.config.settings import Settings, SettingsError, load

WIDTH = 100
HEAD = (
    "Settings of a Whetstone stack: `whetstone up` reads them in this folder, or with --config. `whetstone docs "
    "settings` has all of them. An unknown name stops the start. A variable of the environment wins over its line: "
    "WHETSTONE_POLICY, WHETSTONE_PROXY__PORT."
)


@dataclass(frozen=True)
class Table:
    """A part of the file."""

    name: tuple[str, ...]
    """Its path; empty for the settings at the top."""
    kind: type[Section]
    """Defines the settings, with their descriptions."""
    values: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Any] = field(default_factory=dict)
    """Settings that keep their defaults, each with another value that it could have: written as a comment."""
    remark: str | None = None
    """A comment on the whole table."""
    is_one_of_many: bool = False
    """Whether it is an entry of an array of tables: `[[name]]`."""


def text(tables: Sequence[Table]) -> str:
    """Return the content of the file."""
    return "\n".join([_comment(HEAD), *(line for table in tables for line in _lines(table)), ""])


def write(path: Path, content: str, *, replace: bool, private: bool) -> Settings:
    """Write the file, and return the settings that it makes. Nothing is written if they cannot be used.

    Args:
        path: where to.
        content: of the file.
        replace: whether a file that is there is replaced.
        private: whether only its owner may read it, because it has a password.

    Raises:
        SettingsError: the settings are refused, there is such a file, or it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        settings = load(unfinished, environment={})
        if replace:
            unfinished.replace(path)
        else:
            os.link(unfinished, path)  # fails if there is such a file
    except FileExistsError:
        raise SettingsError(f"{path} is there already; --force replaces it") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return settings


def _lines(table: Table) -> Iterator[str]:
    if table.remark or table.name:
        yield ""
    if table.remark:
        yield _comment(table.remark)
    if table.name:
        name = ".".join(map(_key, table.name))
        yield f"[[{name}]]" if table.is_one_of_many else f"[{name}]"
    for number, (key, value) in enumerate([*table.values.items(), *table.examples.items()]):
        if number or not table.name:
            yield ""
        yield _comment(table.kind.model_fields[key].description or "")
        yield f"{'' if key in table.values else '# '}{_key(key)} = {_value(value)}"


def _comment(words: str) -> str:
    return textwrap.fill(
        " ".join(words.split()), WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    """Return a text, a number, a boolean or a list of them, as TOML."""
    # A string of TOML differs from JSON's in one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
