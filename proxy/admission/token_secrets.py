"""Read the secrets that sign feedback tokens, from the environment or the data folder. The first start makes one.

One secret a line, the newest first: the first signs, all verify. To replace a secret, add a line above it and restart;
remove the old line once the tokens that it signed have expired. Proxies with data folders of their own need the same
secrets, in the environment.
"""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from whetstone.config.settings import FEEDBACK_SECRETS_VARIABLE, SettingsError

FILE = "feedback_secrets"
"""Name of the file in the data folder; it is for its owner alone."""
LEAST_CHARACTERS = 32


def read_secrets(data: Path, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the secrets: those in the environment, else those in the file, which is made if it does not exist.

    Raises:
        SettingsError: a secret is too short, or the file can neither be read nor made.
    """
    text, where = environment.get(FEEDBACK_SECRETS_VARIABLE, ""), FEEDBACK_SECRETS_VARIABLE
    if not text.strip():
        path = data / FILE
        where = str(path)
        try:
            text = _read_or_make(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path}, which signs feedback tokens, cannot be read: {error}") from error
    lines = text.split()
    if not lines or min(map(len, lines)) < LEAST_CHARACTERS:
        raise SettingsError(
            f"{where}: a secret has fewer than {LEAST_CHARACTERS} characters; make one of chance, "
            "`openssl rand -hex 32`, one secret a line"
        )
    return tuple(line.encode() for line in lines)


def _read_or_make(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(secrets.token_hex(32) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        # Another proxy may do the same at this moment: the first link stands, and both read it.
        with suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
    return path.read_text(encoding="utf-8")
