"""Settings of privacy, per project: what is redacted, and how long data is retained.

Patterns are validated here; the proxy applies them.
"""

import hashlib
from typing import Literal

import regex
from pydantic import Field, field_validator

from whetstone.config.rewards import Section

NAME = regex.compile(r"[a-z0-9_-]{1,32}")
FUNCTION = regex.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Preset = Literal["email", "phone", "card", "key"]


class PrivacySettings(Section):
    """Privacy settings of one project."""

    redact: tuple[Preset, ...] = ()
    """What is redacted before anything is written: `email`, `phone`, `card` (with a valid check digit), `key` (API keys
    and tokens of common formats, private keys). Apps and models receive the unredacted text."""
    redact_patterns: dict[str, str] = Field(default_factory=dict)
    """Your own regular expressions, by name. The name replaces what they match: `badge = 'B-\\d{6}'` leaves
    `[badge]`."""
    redact_functions: tuple[str, ...] = ()
    """Your own functions, `package.module:function`, that take a text and return it without private data; they run
    after all patterns. If a function fails, the whole text is dropped. Functions must be importable from the proxy's
    working directory or PYTHONPATH."""
    keep_redacted_ids: bool = False
    """Keep the token ids of a call whose text was redacted, so that it can be trained on. The ids still encode the
    redacted text. Without this setting, such a call is not trained on (`redacted`)."""
    media: Literal["keep", "hash"] = "keep"
    """What is stored of images, audio and files in messages: everything, in base64 as the app sent it (`keep`), or the
    SHA-256 of each, `sha256:…` (`hash`). Token ids stay, which do not contain them; addresses of files stay too."""
    no_train: bool = False
    """Do not train on any call of this project, as if each call had `X-No-Train: true`."""
    keep_days: float | None = Field(None, gt=0)
    """A trajectory is deleted this many days after its last call, to the hour. Unset: none is deleted by age."""

    @field_validator("redact_patterns")
    @classmethod
    def _usable(cls, patterns: dict[str, str]) -> dict[str, str]:
        for name, pattern in patterns.items():
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a pattern: 1 to 32 of a-z 0-9 _ -")
            try:
                compiled = regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"{name}: {pattern!r} is no regular expression: {error}") from error
            if compiled.match("") is not None:
                raise ValueError(f"{name}: {pattern!r} matches where nothing stands; let it match something")
        return patterns

    @field_validator("redact_functions")
    @classmethod
    def _named(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in functions if not FUNCTION.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is no function: write package.module:function")
        return functions

    @property
    def redacts(self) -> bool:
        """Whether anything is removed before it is written."""
        return bool(self.redact or self.redact_patterns or self.redact_functions or self.media == "hash")


def pseudonym(name: str) -> str:
    """Return the pseudonym that is stored instead of a user's name: its SHA-256, 64 hex digits."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
