"""Read and write the text that a custom tool is called with: the one argument of the function that stands for it. Pure.

Follows vLLM 0.32 (`vllm.entrypoints.openai.responses.utils`).
"""

import json
import re

import msgspec


def arguments_of(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool, called with this text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the text that a custom tool is called with: the arguments themselves, if they have another form."""
    try:
        values = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return arguments
    value = values.get("input") if isinstance(values, dict) else None
    return value if isinstance(value, str) else arguments


_BEFORE_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Whole characters within a JSON string; half of an escape waits for the rest."""


class InputReader:
    """Reads the text that a custom tool is called with, while its arguments arrive."""

    def __init__(self) -> None:
        self._rest = ""
        """What was not read yet."""
        self._begun = False

    def feed(self, piece: str) -> str:
        """Take more of the arguments, and return what they add to the text."""
        self._rest += piece
        if not self._begun:
            before = _BEFORE_INPUT.match(self._rest)
            if before is None:
                return ""
            self._begun, self._rest = True, self._rest[before.end() :]
        characters = _CHARACTERS.match(self._rest)
        assert characters is not None  # It may match nothing, but always matches.
        self._rest = self._rest[characters.end() :]
        try:
            return str(msgspec.json.decode(f'"{characters[0]}"'))
        except msgspec.DecodeError:
            return ""
