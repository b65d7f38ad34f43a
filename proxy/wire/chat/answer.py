"""Read a whole chat answer: what was sampled, and the bytes for the app without what it did not request. Pure.

A server writes the same fields in the same order in every answer. Once their names were read one by one, they define a
type with exactly these fields, which decodes the next answer in one pass. The hidden parts are cut out of the answer
only if everything else stands in it byte for byte and in this order. An answer that differs in any way is read field by
field.
"""

from functools import lru_cache
from typing import Any

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.chat.stream import CAPTURED, Visibility, may_be_named, strip_choice, strip_top, struct_of
from proxy.wire.decoding import (
    Number,
    decode,
    encode,
    logprobs_of,
    raw,
    read_ids,
    read_index,
    read_logprobs,
    read_object,
    read_objects,
    read_text,
    usage_of,
)
from proxy.wire.interfaces import UNREADABLE, Answer, PromptResult

NEEDED = frozenset({"id", "model", "choices", "usage", "prompt_token_ids"})
NEEDED_OF_CHOICE = frozenset({"index", "message", "logprobs", "finish_reason", "token_ids"})
"""Fields that an answer, and each of its choices, must have to be read in one pass."""

HIDDEN, MODEL = b"\0", b"\1"
"""Placeholders for parts that are replaced; neither byte can occur in JSON."""
_HIDDEN, _MODEL = msgspec.Raw(HIDDEN), msgspec.Raw(MODEL)
_name = lru_cache(256)(encode)
"""Encodes a model's name as JSON."""


class AnswerTemplate:
    """The fields that similar answers share, and which of them the app does not see."""

    __slots__ = ("_decode", "_ids", "_logprobs", "_of_choice", "_prompt_ids")

    def __init__(self, names: tuple[str, ...], of_choice: tuple[str, ...], hidden: frozenset[str]) -> None:
        """`names` and `of_choice` are the fields of the answer and of each choice, in the order in which they come.
        `hidden` are those that only capture requested."""
        self._ids, self._logprobs = "token_ids" in hidden, "logprobs" in hidden
        self._prompt_ids, self._of_choice = "prompt_token_ids" in hidden, self._ids + self._logprobs
        read = {name: CAPTURED[name] for name in hidden}
        choice = struct_of("Choice", of_choice, read | {"index": Number, "finish_reason": str | None})
        answer = struct_of("Answer", names, read | {"id": str | None, "choices": list[choice]})  # type: ignore[valid-type]
        self._decode = msgspec.json.Decoder(answer).decode

    def read(self, body: bytes, model: str) -> Answer | None:
        """Read an answer for an app that requested this model. Return None if it has another form."""
        try:
            decoded: Any = self._decode(body)
            pieces, prompt_ids = decoded.choices, decoded.prompt_token_ids
            if self._prompt_ids:
                decoded.prompt_token_ids = _HIDDEN
            else:
                prompt_ids = read_ids(prompt_ids)
            # Most answers have one choice.
            choices = (self._take(pieces[0]),) if len(pieces) == 1 else tuple(map(self._take, pieces))
            read, answered = usage_of(decoded.usage)
            result = PromptResult(prompt_ids, read, choices, 0, answered)
        except UNREADABLE:
            return None
        served, decoded.model = len(decoded.model), _MODEL
        hidden = self._prompt_ids + len(pieces) * self._of_choice
        client_body = _cut(body, encode(decoded), served, _name(model), hidden)
        return None if client_body is None else Answer(client_body, decoded.id, (result,))

    def _take(self, piece: Any) -> Choice:
        """Return a choice, and replace its hidden fields."""
        message, token_ids, logprobs = decode(piece.message), piece.token_ids, piece.logprobs
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
def template_of(names: tuple[str, ...], of_choice: tuple[str, ...], hidden: frozenset[str]) -> AnswerTemplate | None:
    """Return the form of answers with these fields. None if a required field is missing, or a name cannot be a
    field's."""
    whole = NEEDED.issubset(names) and NEEDED_OF_CHOICE.issubset(of_choice)
    return AnswerTemplate(names, of_choice, hidden) if whole and all(map(may_be_named, names + of_choice)) else None


def _cut(body: bytes, encoded: bytes, served: int, model: bytes, hidden: int) -> bytes | None:
    """Return the answer's bytes for the app, made from `encoded`, the answer encoded again. None if it did not come in
    that form. `served` is the length of the model's name in the answer, `hidden` the number of hidden parts.

    The fields are known to be the same. The parts at the beginning, at the end and between placeholders prove their
    order, and that each is written as it was.
    """
    before, _, rest = encoded.partition(MODEL)
    part, more, rest = rest.partition(HIDDEN)
    at = len(before) + served
    if not (body.startswith(before) and body.startswith(part, at)):
        return None
    parts = [before + model + part]
    while more:
        at += len(part)
        part, more, rest = rest.partition(HIDDEN)
        # The last part is not searched for: the ids of a long prompt may stand before it.
        if more:
            at = body.find(part, at)
            if at < 0:
                return None
        parts.append(part)
    # A text may contain a placeholder's byte: that is invalid JSON, but it would be accepted.
    return b"null".join(parts) if len(parts) == hidden + 1 and body.endswith(part, at) else None


_last_templates: dict[tuple[bool, ...], AnswerTemplate | None] = {}
"""The form of the last answer read field by field, by which of CAPTURED the app wants: eight at most."""


def read_answer(body: bytes, visibility: Visibility) -> Answer:
    """Read an answer.

    Raises:
        UNREADABLE: it is not the answer of a chat completion.
    """
    wanted = visibility.wants_logprobs, visibility.wants_token_ids, visibility.wants_prompt_token_ids
    template = None if visibility.hides_reasoning else _last_templates.get(wanted)
    answer = None if template is None else template.read(body, visibility.model)
    return _read_fields(body, visibility, wanted) if answer is None else answer


def _read_fields(body: bytes, visibility: Visibility, wanted: tuple[bool, ...]) -> Answer:
    """Read an answer field by field. Store its form, as the next answer may have the same."""
    fields = read_object(body)
    pieces = read_objects(fields["choices"])
    names = {tuple(piece) for piece in pieces}
    if len(names) == 1 and not visibility.hides_reasoning:
        hidden = frozenset(name for name, is_wanted in zip(CAPTURED, wanted, strict=True) if not is_wanted)
        _last_templates[wanted] = template_of(tuple(fields), names.pop(), hidden)
    choices, prompt_ids = [], read_ids(fields.get("prompt_token_ids"))
    for piece in pieces:
        message: dict[str, Any] = decode(piece["message"])
        choices.append(
            Choice(
                index=read_index(piece["index"]),
                message={key: value for key, value in message.items() if value is not None},
                finish_reason=read_text(piece.get("finish_reason", NULL)),
                token_ids=read_ids(piece.get("token_ids")),
                logprobs=read_logprobs(piece.get("logprobs")),
            )
        )
        strip_choice(piece, visibility)
    strip_top(fields, visibility)
    fields["choices"] = raw(pieces)
    read, answered = usage_of(fields.get("usage"))
    result = PromptResult(prompt_ids, read, tuple(choices), 0, answered)
    return Answer(encode(fields), read_text(fields.get("id", NULL)), (result,))
