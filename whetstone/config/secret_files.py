"""Read secrets from files, as containers provide them: `WHETSTONE_DATABASE_FILE` names the file that contains
`WHETSTONE_DATABASE`."""

from collections.abc import Iterable, MutableMapping
from pathlib import Path

from whetstone.errors import WhetstoneError

SUFFIX = "_FILE"
MOST_BYTES = 64 * 2**10
"""A longer file is not a secret: the path is probably wrong."""


class SecretUnreadable(WhetstoneError):
    """A secret file cannot be used. The message names the file and the reason, and never quotes its content."""


def take_up(environment: MutableMapping[str, str], names: Iterable[str]) -> None:
    """Replace each `…_FILE` variable of `names` in `environment` by the file's content without the final line break.

    Raises:
        SecretUnreadable: a file cannot be read, is empty or too long; or the variable itself is set as well.
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
            content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SecretUnreadable(f"{variable} names {path}, which cannot be read: {why}") from None
    if not text.strip() or len(content) > MOST_BYTES:
        raise SecretUnreadable(f"{variable} names {path}, which is {'too long' if text.strip() else 'empty'}")
    return text.rstrip("\r\n")
