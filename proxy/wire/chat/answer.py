"""Read a whole chat answer: what was sampled, and the bytes for the app without what it did not request. Pure."""

from typing import Any, Protocol

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.chat.answer_template import AnswerTemplate, template_of
from proxy.wire.interfaces import Answer, PromptResult, raw, read_index, read_object, read_objects, read_text
from proxy.wire.tokens import prompt_tokens_of, read_ids, read_logprobs


class Visibility(Protocol):
    """Which parts of an answer the app requested."""

    model: str
    hides_reasoning: bool
    wants_logprobs: bool
    wants_token_ids: bool
    wants_prompt_token_ids: bool


_CAPTURED = ("logprobs", "token_ids", "prompt_token_ids")
_last_templates: dict[tuple[bool, ...], AnswerTemplate | None] = {}
"""The form of the last answer read field by field, by which of _CAPTURED the app wants: eight at most."""


def strip_choice(choice: dict[str, msgspec.Raw], visibility: Visibility) -> None:
    """Remove from a choice what capture added, leaving the nulls that vLLM would have sent without it."""
    if not visibility.wants_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not visibility.wants_logprobs:
        choice["logprobs"] = NULL
    if visibility.hides_reasoning:
        _hide_reasoning(choice)


def _hide_reasoning(choice: dict[str, msgspec.Raw]) -> None:
    """Hide the reasoning as vLLM does: null in its place, and an empty delta if it holds nothing else."""
    part = "delta" if "delta" in choice else "message"
    fields: dict[str, Any] = msgspec.json.decode(choice[part])
    if part == "message" or fields.get("content") or fields.get("tool_calls"):
        choice[part] = raw(fields | {"reasoning": None})
    elif "role" not in fields:
        choice[part] = raw({})


def strip_top(fields: dict[str, msgspec.Raw], visibility: Visibility) -> None:
    """Do the same for the answer's top-level fields, and set `model` to the name that the app requested."""
    if not visibility.wants_prompt_token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    if "model" in fields:
        fields["model"] = raw(visibility.model)


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
        hidden = frozenset(name for name, is_wanted in zip(_CAPTURED, wanted, strict=True) if not is_wanted)
        _last_templates[wanted] = template_of(tuple(fields), names.pop(), hidden)
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
        strip_choice(piece, visibility)
    strip_top(fields, visibility)
    fields["choices"] = raw(pieces)
    result = PromptResult(prompt_token_ids, prompt_tokens_of(fields.get("usage")), tuple(choices))
    return Answer(msgspec.json.encode(fields), read_text(fields.get("id", NULL)), (result,))
