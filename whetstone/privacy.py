"""Settings of privacy, of one project each: what is not written down, and how long the rest is kept.

A leaf of `whetstone.settings`. Knows which patterns can be used; what they find is redacted in the proxy.
"""

import hashlib
from typing import Literal

import regex
from pydantic import Field, field_validator

from whetstone.worth import Section

NAME = regex.compile(r"[a-z0-9_-]{1,32}")
FUNCTION = regex.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

Preset = Literal["email", "phone", "card", "key"]


class PrivacySettings(Section):
    """What a project's calls leave behind."""

    redact: tuple[Preset, ...] = ()
    """What is taken out before anything is written: `email`, `phone`, `card` (with a valid check digit), `key` (API
    keys and tokens of the usual makes, private keys). Apps and models get everything as it is."""
    redact_patterns: dict[str, str] = Field(default_factory=dict)
    """Regular expressions of your own, by a name that stands in place of what they match: `badge = 'B-\\d{6}'` leaves
    `[badge]`."""
    redact_functions: tuple[str, ...] = ()
    """Functions of your own, `package.module:function`, that take a text and return it without what is private; after
    all patterns. One that fails costs the whole text. Importable from the proxy's working directory or PYTHONPATH."""
    keep_redacted_ids: bool = False
    """Keep the token ids of a call whose text was redacted, so that it can be trained on: they spell out what was taken
    from the text. Without it such a call is not trained on (`redacted`)."""
    no_train: bool = False
    """Train on nothing of this project, as if each call came with `X-No-Train: true`."""
    keep_days: float | None = Field(None, gt=0)
    """Days after its last call that a trajectory is deleted, to the hour; without it none is by its age."""

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
        for name in functions:
            if not FUNCTION.fullmatch(name):
                raise ValueError(f"{name!r} is no function: write package.module:function")
        return functions

    @property
    def redacts(self) -> bool:
        """Whether anything is taken out at all."""
        return bool(self.redact or self.redact_patterns or self.redact_functions)


def pseudonym(name: str) -> str:
    """What stands for a user's name that is not to be written down: its SHA-256, 64 hex digits."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
