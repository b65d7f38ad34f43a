"""Chunks of one stream that are alike but for their one choice: read and made in a few microseconds each. Pure.

Most events of a stream differ in what one choice says and in nothing else. What stands before and behind it is compared
as bytes, and its fields are read by a type of exactly these names, which a server writes in one order; whatever differs
in any other way is left to whoever reads every field.
"""

from functools import lru_cache
from typing import Any

import msgspec

from proxy.call import NULL
from proxy.wire.dialect import Number
from proxy.wire.forms import may_be_named
from proxy.wire.sampled import ChoiceLogprobs

MOST_TRIES = 8
"""Chunks in a row that were like none before: then this is no stream of such."""
NEEDED = frozenset({"index", "delta", "finish_reason", "logprobs"})
"""Fields that every choice has which is read so."""
_CHOICES = b'"choices":['
_HIDDEN: dict[str, Any] = {"token_ids": list[Number] | None, "logprobs": ChoiceLogprobs | None}
"""What is read of a choice at once, where it does not go on to the app; of the rest the bytes are kept."""
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Alike:
    """What the last chunk that was read field by field has in common with those that follow."""

    __slots__ = ("_after", "_before", "_begins", "_decode", "_ends", "_hidden", "_left", "said_after", "said_before",
                 "tells_ids")  # fmt: skip

    def __init__(self, hidden: frozenset[str]) -> None:
        """`hidden`: fields of a choice that do not go on to the app."""
        self._hidden = hidden
        self._before, self._after = b"", b""
        self._begins, self._ends = 0, 0
        self.tells_ids = False
        """The choices that are alike have a field for their ids."""
        self.said_before, self.said_after = b"", b""
        """What the choice stands between as it goes out, the empty line included."""
        self._decode: Any = None
        self._left = MOST_TRIES

    def learn(self, event: bytes, said: bytes, names: tuple[str, ...]) -> None:
        """Take a chunk with one choice as the model of those that follow. `event`: as it came; `said`: as it goes out,
        both without the empty line; `names`: of the choice's fields, in the order in which they came."""
        self._decode = None
        if self._left <= 0 or not NEEDED.issubset(names) or not all(map(may_be_named, names)):
            return
        self._left -= 1
        came, goes = _parts(event), _parts(said)
        if came is not None and goes is not None:
            self._before, self._after = came
            self._begins, self._ends = len(self._before), -len(self._after)
            self.said_before, self.said_after = goes[0], goes[1] + b"\n\n"
            self.tells_ids = "token_ids" in names
            self._decode = _decoder(names, self._hidden)

    def read(self, event: bytes) -> Any:
        """The choice of a chunk that is alike; None of any other. `index` is a number, `token_ids` and `logprobs` are
        read where they are hidden, all else is Raw."""
        if self._decode is None or not (event.startswith(self._before) and event.endswith(self._after)):
            return None
        try:
            choice = self._decode(event[self._begins : self._ends])
        except msgspec.DecodeError:
            return None
        self._left = MOST_TRIES
        return choice


def _parts(event: bytes) -> tuple[bytes, bytes] | None:
    """What stands before the one choice, and behind it; None where that cannot be told."""
    at = event.find(_CHOICES)
    before = event[: at + len(_CHOICES)]
    if at < 0 or not before.startswith(b"data: {"):
        return None
    try:
        # What is whole with nothing in the list is the top of the chunk, and not a text that looks like it.
        _object.decode(before[len(b"data: ") :] + b"]}")
        fields = _object.decode(event[len(b"data: ") :])
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
