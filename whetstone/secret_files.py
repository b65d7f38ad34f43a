"""Secrets in files, as containers bring them: `WHETSTONE_DATABASE_FILE` names the file that has `WHETSTONE_DATABASE`.

Knows names and files; what a value means is the settings' to say.
"""

from collections.abc import Iterable, MutableMapping
from pathlib import Path

SUFFIX = "_FILE"
MOST_BYTES = 64 * 2**10
"""A longer file is no secret: somebody named the wrong one."""


class SecretUnreadable(Exception):
    """A file that is named cannot be taken; the message says which, and why. It never quotes the file."""


def take_up(environment: MutableMapping[str, str], names: Iterable[str]) -> None:
    """Have in `environment` those of `names` whose files it names, without their last line's end, in the files' place.

    Raises:
        SecretUnreadable: a file cannot be read, is empty or too long; or the variable is there as well.
    """
    for name in names:
        path = environment.get(name + SUFFIX)
        if path is None:
            continue
        if environment.get(name):
            raise SecretUnreadable(f"{name} and {name}{SUFFIX} are both set; which one counts? Take one out")
        environment[name] = _read(name + SUFFIX, Path(path))
        del environment[name + SUFFIX]


def _read(variable: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            told = file.read(MOST_BYTES + 1)
        text = told.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SecretUnreadable(f"{variable} names {path}, which cannot be read: {why}") from None
    if not text.strip() or len(told) > MOST_BYTES:
        raise SecretUnreadable(f"{variable} names {path}, which is {'too long' if text.strip() else 'empty'}")
    return text.rstrip("\r\n")
