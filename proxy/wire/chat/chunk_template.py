"""Read and rewrite chunks of one stream that differ only in their one choice, in a few microseconds each. Pure.

Most events of a stream differ only in one choice. The bytes before and after it are compared, and its fields are
decoded by a type with exactly these names, which a server writes in one order. A chunk that differs in any other way is
read field by field (`stream`).
"""

from functools import lru_cache
from typing import Any

import msgspec

from proxy.domain.call import NULL
from proxy.wire.chat.answer_template import may_be_named
from proxy.wire.interfaces import Number, read_object
from proxy.wire.tokens import ChoiceLogprobs

MOST_TRIES = 8
"""Most chunks learned in a row without a match. After that, this stream has no such chunks."""
NEEDED = frozenset({"index", "delta", "finish_reason", "logprobs"})
"""Fields that a choice must have to be read this way."""
_CHOICES = b'"choices":['
_HIDDEN: dict[str, Any] = {"token_ids": list[Number] | None, "logprobs": ChoiceLogprobs | None}
"""Fields of a choice that are decoded, if they are hidden from the app. The bytes of the others pass unchanged."""
_encode = msgspec.json.Encoder().encode


class ChunkTemplate:
    """What the last chunk read field by field has in common with those that follow."""

    __slots__ = ("_after", "_before", "_begins", "_decode", "_ends", "_hidden", "_left", "has_ids", "output_after",
                 "output_before")  # fmt: skip

    def __init__(self, hidden: frozenset[str]) -> None:
        """`hidden`: fields of a choice that are not passed on to the app."""
        self._hidden = hidden
        self._before, self._after = b"", b""
        self._begins, self._ends = 0, 0
        self.has_ids = False
        """Whether the similar choices have a field for their ids."""
        self.output_before, self.output_after = b"", b""
        """What surrounds the choice in the output, including the empty line."""
        self._decode: Any = None
        self._left = MOST_TRIES

    def fit(self, event: bytes, output: bytes, names: tuple[str, ...]) -> None:
        """Learn a chunk with one choice as the template for those that follow.

        `event` is the chunk as it came and `output` as it goes out, both without the empty line. `names` are the
        choice's fields in the order in which they came.
        """
        self._decode = None
        if self._left <= 0 or not NEEDED.issubset(names) or not all(map(may_be_named, names)):
            return
        self._left -= 1
        came, goes = _parts(event), _parts(output)
        if came is not None and goes is not None:
            self._before, self._after = came
            self._begins, self._ends = len(self._before), -len(self._after)
            self.output_before, self.output_after = goes[0], goes[1] + b"\n\n"
            self.has_ids = "token_ids" in names
            self._decode = _decoder(names, self._hidden)

    def match(self, event: bytes) -> Any:
        """Return the choice of a chunk that matches, else None. `index` is a number; `token_ids` and `logprobs` are
        decoded if they are hidden; all else is Raw."""
        if self._decode is None or not (event.startswith(self._before) and event.endswith(self._after)):
            return None
        try:
            choice = self._decode(event[self._begins : self._ends])
        except msgspec.DecodeError:
            return None
        self._left = MOST_TRIES
        return choice


def _parts(event: bytes) -> tuple[bytes, bytes] | None:
    """Return what stands before and after the one choice, or None if that is unclear."""
    at = event.find(_CHOICES)
    before = event[: at + len(_CHOICES)]
    if at < 0 or not before.startswith(b"data: {"):
        return None
    try:
        # If it parses with an empty list, this is the top level of the chunk, and not a text that looks like it.
        read_object(before[len(b"data: ") :] + b"]}")
        fields = read_object(event[len(b"data: ") :])
    except msgspec.DecodeError:
        return None
    names = list(fields)
    behind = {name: fields[name] for name in names[names.index("choices") + 1 :]}
    if any(value != NULL for value in behind.values()):
        return None
    after = b"]" + b"".join(b",%b:null" % _encode(name) for name in behind) + b"}"
    return (before, after) if event.endswith(b"}" + after) else None


@lru_cache(64)
def _decoder(names: tuple[str, ...], hidden: frozenset[str]) -> Any:
    types = {"index": Number} | {name: _HIDDEN[name] for name in hidden}
    fields = [(name, types.get(name, msgspec.Raw)) for name in names]
    made = msgspec.defstruct("Choice", fields, forbid_unknown_fields=True, gc=False)
    return msgspec.json.Decoder(made).decode
