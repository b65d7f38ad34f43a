"""Whole chat answers of one form: read in one pass, and cut where others are written anew. Pure.

A server writes the same fields in the same order, answer after answer. Their names, once they were read one by one,
make a type of exactly these, which reads the next answer at once. What it tells is cut out of the answer only where all
that is left stands in it byte for byte, and in this order; whatever differs in any way is left to whoever reads every
field.
"""

from functools import lru_cache
from keyword import iskeyword
from typing import Any

import msgspec

from proxy.call import Choice
from proxy.wire.dialect import UNREADABLE, Answer, Heard, Number
from proxy.wire.sampled import ChoiceLogprobs, logprobs_of, prompt_tokens_of, read_ids, read_logprobs

NEEDED = frozenset({"id", "model", "choices", "usage", "prompt_token_ids"})
NEEDED_OF_CHOICE = frozenset({"index", "message", "logprobs", "finish_reason", "token_ids"})
"""Fields that every answer has which is read so, and every choice of it."""

HIDDEN, MODEL = b"\0", b"\1"
"""Stand where something else is to stand; JSON has no such bytes in it."""
_HIDDEN, _MODEL = msgspec.Raw(HIDDEN), msgspec.Raw(MODEL)
_encode = msgspec.json.Encoder().encode
_message = msgspec.json.Decoder().decode
_name = lru_cache(256)(_encode)
"""Of a model, as JSON."""


class Form:
    """The fields of answers that are alike, and which of them the app does not see."""

    __slots__ = ("_decode", "_ids", "_logprobs", "_of_choice", "_prompt_ids")

    def __init__(self, names: tuple[str, ...], of_choice: tuple[str, ...], hidden: frozenset[str]) -> None:
        """`names`: of the answer's fields and of each choice's, in the order in which they come; `hidden`: those that
        capture alone asked for."""
        ids = list[Number] | None
        self._ids, self._logprobs = "token_ids" in hidden, "logprobs" in hidden
        self._prompt_ids, self._of_choice = "prompt_token_ids" in hidden, self._ids + self._logprobs
        read: dict[str, Any] = {"index": Number, "finish_reason": str | None}
        read |= {"token_ids": ids} if self._ids else {}
        read |= {"logprobs": ChoiceLogprobs | None} if self._logprobs else {}
        choice = _struct("Choice", of_choice, read)
        read = {"id": str | None, "choices": list[choice]}  # type: ignore[valid-type]
        read |= {"prompt_token_ids": ids} if self._prompt_ids else {}
        self._decode = msgspec.json.Decoder(_struct("Answer", names, read)).decode

    def read(self, body: bytes, model: str) -> Answer | None:
        """Take an answer apart, for an app that asked for this model; None where it is of another form."""
        try:
            told: Any = self._decode(body)
            pieces, prompt_ids = told.choices, told.prompt_token_ids
            if self._prompt_ids:
                told.prompt_token_ids = _HIDDEN
            else:
                prompt_ids = read_ids(prompt_ids)
            # Most answers have one choice.
            choices = (self._take(pieces[0]),) if len(pieces) == 1 else tuple(map(self._take, pieces))
            heard = Heard(prompt_ids, prompt_tokens_of(told.usage), choices)
        except UNREADABLE:
            return None
        served, told.model = len(told.model), _MODEL
        hidden = self._prompt_ids + len(pieces) * self._of_choice
        said = _cut(body, _encode(told), served, _name(model), hidden)
        return None if said is None else Answer(said, told.id, (heard,))

    def _take(self, piece: Any) -> Choice:
        """What a choice says; what is hidden of it is taken out."""
        message, token_ids, logprobs = _message(piece.message), piece.token_ids, piece.logprobs
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if self._ids:
            piece.token_ids = _HIDDEN
        else:
            token_ids = read_ids(token_ids)
        if self._logprobs:
            piece.logprobs = _HIDDEN
            logprobs = logprobs_of(logprobs)
        else:
            logprobs = read_logprobs(logprobs)
        return Choice(piece.index, message, piece.finish_reason, token_ids, logprobs)


@lru_cache(64)
def form_of(names: tuple[str, ...], of_choice: tuple[str, ...], hidden: frozenset[str]) -> Form | None:
    """The form of answers with these fields; None where they lack one that is needed, or have one with an odd name."""
    whole = NEEDED.issubset(names) and NEEDED_OF_CHOICE.issubset(of_choice)
    return Form(names, of_choice, hidden) if whole and all(map(may_be_named, names + of_choice)) else None


def may_be_named(name: str) -> bool:
    """Whether a type may have a field of this name."""
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


def _struct(name: str, names: tuple[str, ...], read: dict[str, Any]) -> type[msgspec.Struct]:
    fields = [(one, read.get(one, msgspec.Raw)) for one in names]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, gc=False)


def _cut(body: bytes, said: bytes, served: int, model: bytes, hidden: int) -> bytes | None:
    """What goes out, made of `said`, the answer as it would be written anew; None where that is not how it came.
    `served`: how long the model's name in it is; `hidden`: how many pieces of it are.

    The fields are known to be the same: what stands at the beginning, at the end and in between tells their order, and
    that each is written as it was.
    """
    before, _, rest = said.partition(MODEL)
    part, more, rest = rest.partition(HIDDEN)
    at = len(before) + served
    if not (body.startswith(before) and body.startswith(part, at)):
        return None
    parts = [before + model + part]
    while more:
        at += len(part)
        part, more, rest = rest.partition(HIDDEN)
        # What ends it need not be looked for: the ids of a long prompt may stand before it.
        if more:
            at = body.find(part, at)
            if at < 0:
                return None
        parts.append(part)
    # A text may have a byte in it that stands for what is hidden: that is no JSON, but it would be read.
    return b"null".join(parts) if len(parts) == hidden + 1 and body.endswith(part, at) else None
