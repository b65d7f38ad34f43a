"""Read secrets from files, as containers provide them: `WHETSTONE_DATABASE_FILE` names the file that contains
`WHETSTONE_DATABASE`."""

from collections.abc import Iterable, MutableMapping
from pathlib import Path

from whetstone.errors import SettingsError

SUFFIX = "_FILE"
MOST_BYTES = 64 * 2**10
"""A longer file is not a secret: the path is probably wrong."""


def take_up(environment: MutableMapping[str, str], names: Iterable[str]) -> None:
    """Replace each `…_FILE` variable of `names` in `environment` by the file's content without the final line break.

    Raises:
        SettingsError: a file cannot be read, is empty or too long; or the variable itself is set as well. The message
            never quotes the file.
    """
    for name in names:
        if name + SUFFIX in environment:
            if environment.get(name):
                raise SettingsError(f"{name} and {name}{SUFFIX} are both set; which one counts? Take one out")
            environment[name] = _read(name + SUFFIX, Path(environment[name + SUFFIX]))
            del environment[name + SUFFIX]


def _read(variable: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"{variable} names {path}, which cannot be read: {why}") from None
    if not text.strip() or len(content) > MOST_BYTES:
        raise SettingsError(f"{variable} names {path}, which is {'too long' if text.strip() else 'empty'}")
    return text.rstrip("\r\n")
