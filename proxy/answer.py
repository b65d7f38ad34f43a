"""A whole chat answer: what was sampled, and the bytes for the app without what it did not ask for. Pure."""

from typing import Any

import msgspec

from proxy.call import NULL, Choice
from proxy.request import Asked

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError)
"""What taking an answer apart raises where it is none of a chat completion."""


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _ChoiceLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_ids = msgspec.json.Decoder(list[int] | None)
_logprobs = msgspec.json.Decoder(_ChoiceLogprobs | None)


def read_ids(raw: msgspec.Raw | None) -> list[int] | None:
    """Token ids as vLLM sends them; None where it sent none."""
    return None if raw is None else _ids.decode(raw)


def read_logprobs(raw: msgspec.Raw | None) -> list[float] | None:
    """One logprob per sampled token, in nats; None where vLLM sent none."""
    logprobs = None if raw is None else _logprobs.decode(raw)
    if logprobs is None or logprobs.content is None:
        return None
    return [token.logprob for token in logprobs.content]


def strip_choice(choice: dict[str, msgspec.Raw], asked: Asked) -> None:
    """Take out of a choice what capture added, leaving the nulls vLLM alone would have sent."""
    if not asked.wants_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not asked.wants_logprobs:
        choice["logprobs"] = NULL
    if asked.hides_reasoning:
        _hide_reasoning(choice)


def _hide_reasoning(choice: dict[str, msgspec.Raw]) -> None:
    """As vLLM does it: a null in its place, and nothing left of a delta that says nothing else."""
    part = "delta" if "delta" in choice else "message"
    said: dict[str, Any] = msgspec.json.decode(choice[part])
    if part == "message" or said.get("content") or said.get("tool_calls"):
        choice[part] = _raw(said | {"reasoning": None})
    elif "role" not in said:
        choice[part] = _raw({})


def strip_top(fields: dict[str, msgspec.Raw], asked: Asked) -> None:
    """The same for the fields beside the choices; `model` says what the app asked for."""
    if not asked.wants_prompt_token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    if "model" in fields:
        fields["model"] = _raw(asked.model)


class Answer(msgspec.Struct, frozen=True):
    """A chat answer, taken apart."""

    for_app: bytes
    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]


def read_answer(body: bytes, asked: Asked) -> Answer:
    """Take an answer of vLLM's apart.

    Raises:
        UNREADABLE: it is not the answer of a chat completion.
    """
    fields = _object.decode(body)
    raw_choices = _objects.decode(fields["choices"])
    usage: dict[str, Any] | None = msgspec.json.decode(fields["usage"]) if "usage" in fields else None
    prompt_token_ids = read_ids(fields.get("prompt_token_ids"))
    choices = []
    for raw in raw_choices:
        message: dict[str, Any] = msgspec.json.decode(raw["message"])
        choices.append(
            Choice(
                index=msgspec.json.decode(raw["index"]),
                message={key: value for key, value in message.items() if value is not None},
                text=message.get("content"),
                finish_reason=msgspec.json.decode(raw.get("finish_reason", NULL)),
                token_ids=read_ids(raw.get("token_ids")),
                logprobs=read_logprobs(raw.get("logprobs")),
            )
        )
        strip_choice(raw, asked)
    strip_top(fields, asked)
    fields["choices"] = _raw(raw_choices)
    return Answer(
        for_app=msgspec.json.encode(fields),
        prompt_token_ids=prompt_token_ids,
        prompt_tokens=usage.get("prompt_tokens") if usage else None,
        choices=tuple(choices),
    )


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
