"""Read a whole chat answer: what was sampled, and the bytes for the app without what it did not request. Pure."""

from typing import Any, Protocol

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.chat.answer_template import AnswerTemplate, form_of
from proxy.wire.interfaces import Answer, PromptResult, raw, read_index, read_text
from proxy.wire.tokens import prompt_tokens_of, read_ids, read_logprobs


class Wants(Protocol):
    """Which parts of an answer the app requested."""

    model: str
    hides_reasoning: bool
    wants_logprobs: bool
    wants_token_ids: bool
    wants_prompt_token_ids: bool


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_CAPTURED = ("logprobs", "token_ids", "prompt_token_ids")
_last_forms: dict[tuple[bool, ...], AnswerTemplate | None] = {}
"""The form of the last answer read field by field, by which of _CAPTURED the app wants: eight at most."""


def strip_choice(choice: dict[str, msgspec.Raw], wants: Wants) -> None:
    """Remove from a choice what capture added, leaving the nulls that vLLM would have sent without it."""
    if not wants.wants_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not wants.wants_logprobs:
        choice["logprobs"] = NULL
    if wants.hides_reasoning:
        _hide_reasoning(choice)


def _hide_reasoning(choice: dict[str, msgspec.Raw]) -> None:
    """Hide the reasoning as vLLM does: null in its place, and an empty delta if it holds nothing else."""
    part = "delta" if "delta" in choice else "message"
    said: dict[str, Any] = msgspec.json.decode(choice[part])
    if part == "message" or said.get("content") or said.get("tool_calls"):
        choice[part] = raw(said | {"reasoning": None})
    elif "role" not in said:
        choice[part] = raw({})


def strip_top(fields: dict[str, msgspec.Raw], wants: Wants) -> None:
    """Do the same for the answer's top-level fields, and set `model` to the name that the app requested."""
    if not wants.wants_prompt_token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    if "model" in fields:
        fields["model"] = raw(wants.model)


def read_answer(body: bytes, wants: Wants) -> Answer:
    """Read an answer.

    Raises:
        UNREADABLE: it is not the answer of a chat completion.
    """
    wanted = wants.wants_logprobs, wants.wants_token_ids, wants.wants_prompt_token_ids
    form = None if wants.hides_reasoning else _last_forms.get(wanted)
    answer = None if form is None else form.read(body, wants.model)
    return _read_fields(body, wants, wanted) if answer is None else answer


def _read_fields(body: bytes, wants: Wants, wanted: tuple[bool, ...]) -> Answer:
    """Read an answer field by field. Store its form, as the next answer may have the same."""
    fields = _object.decode(body)
    pieces = _objects.decode(fields["choices"])
    names = {tuple(piece) for piece in pieces}
    if len(names) == 1 and not wants.hides_reasoning:
        hidden = frozenset(name for name, asked_for in zip(_CAPTURED, wanted, strict=True) if not asked_for)
        _last_forms[wanted] = form_of(tuple(fields), names.pop(), hidden)
    prompt_token_ids = read_ids(fields.get("prompt_token_ids"))
    choices = []
    for piece in pieces:
        message: dict[str, Any] = msgspec.json.decode(piece["message"])
        choices.append(
            Choice(
                index=read_index(piece["index"]),
                message={key: value for key, value in message.items() if value is not None},
                finish_reason=read_text(piece.get("finish_reason", NULL)),
                token_ids=read_ids(piece.get("token_ids")),
                logprobs=read_logprobs(piece.get("logprobs")),
            )
        )
        strip_choice(piece, wants)
    strip_top(fields, wants)
    fields["choices"] = raw(pieces)
    heard = PromptResult(prompt_token_ids, prompt_tokens_of(fields.get("usage")), tuple(choices))
    return Answer(msgspec.json.encode(fields), read_text(fields.get("id", NULL)), (heard,))
