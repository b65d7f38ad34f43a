"""A whole chat answer: what was sampled, and the bytes for the app without what it did not ask for. Pure."""

from typing import Any, Protocol

import msgspec

from proxy.call import NULL, Choice
from proxy.wire.dialect import Answer, Heard, Number, raw, read_index, read_text


class Wants(Protocol):
    """What of an answer the app asked for."""

    model: str
    hides_reasoning: bool
    wants_logprobs: bool
    wants_token_ids: bool
    wants_prompt_token_ids: bool


class _Usage(msgspec.Struct):
    prompt_tokens: Number | None = None


class TokenLogprob(msgspec.Struct):
    """Of one sampled token, in nats."""

    logprob: float


class ChoiceLogprobs(msgspec.Struct):
    """As much of a choice's logprobs as is kept."""

    content: list[TokenLogprob] | None = None


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_ids = msgspec.json.Decoder(list[Number] | None)
_logprobs = msgspec.json.Decoder(ChoiceLogprobs | None)
_usage = msgspec.json.Decoder(_Usage | None)


def read_ids(piece: msgspec.Raw | None) -> list[int] | None:
    """Token ids as vLLM sends them; None where it sent none."""
    return None if piece is None else _ids.decode(piece)


def read_logprobs(piece: msgspec.Raw | None) -> list[float] | None:
    """One logprob per sampled token, in nats; None where vLLM sent none."""
    return None if piece is None else logprobs_of(_logprobs.decode(piece))


def logprobs_of(logprobs: ChoiceLogprobs | None) -> list[float] | None:
    """Those of a choice, one per sampled token; None where vLLM sent none."""
    if logprobs is None or logprobs.content is None:
        return None
    return [token.logprob for token in logprobs.content]


def prompt_tokens_of(piece: msgspec.Raw | None) -> int | None:
    """How many tokens the prompt has, by the usage; None where it was not told."""
    usage = None if piece is None else _usage.decode(piece)
    return None if usage is None else usage.prompt_tokens


def strip_choice(choice: dict[str, msgspec.Raw], wants: Wants) -> None:
    """Take out of a choice what capture added, leaving the nulls vLLM alone would have sent."""
    if not wants.wants_token_ids and "token_ids" in choice:
        choice["token_ids"] = NULL
    if not wants.wants_logprobs:
        choice["logprobs"] = NULL
    if wants.hides_reasoning:
        _hide_reasoning(choice)


def _hide_reasoning(choice: dict[str, msgspec.Raw]) -> None:
    """As vLLM does it: a null in its place, and nothing left of a delta that says nothing else."""
    part = "delta" if "delta" in choice else "message"
    said: dict[str, Any] = msgspec.json.decode(choice[part])
    if part == "message" or said.get("content") or said.get("tool_calls"):
        choice[part] = raw(said | {"reasoning": None})
    elif "role" not in said:
        choice[part] = raw({})


def strip_top(fields: dict[str, msgspec.Raw], wants: Wants) -> None:
    """The same for the fields beside the choices; `model` says what the app asked for."""
    if not wants.wants_prompt_token_ids and "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = NULL
    if "model" in fields:
        fields["model"] = raw(wants.model)


def read_answer(body: bytes, wants: Wants) -> Answer:
    """Take an answer apart.

    Raises:
        UNREADABLE: it is not the answer of a chat completion.
    """
    fields = _object.decode(body)
    pieces = _objects.decode(fields["choices"])
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
    heard = Heard(prompt_token_ids, prompt_tokens_of(fields.get("usage")), tuple(choices))
    return Answer(msgspec.json.encode(fields), read_text(fields.get("id", NULL)), (heard,))
