"""What a model server tells of tokens: their ids, their logprobs, how many the prompt has. Pure."""

import msgspec

from proxy.wire.dialect import Number


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Number | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """Of one sampled token, in nats."""

    logprob: float


class ChoiceLogprobs(msgspec.Struct, gc=False):
    """As much of a choice's logprobs as is kept."""

    content: list[TokenLogprob] | None = None


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
    told = logprobs.content
    # An event of a stream tells of one token.
    return [told[0].logprob] if len(told) == 1 else [token.logprob for token in told]


def prompt_tokens_of(piece: msgspec.Raw | None) -> int | None:
    """How many tokens the prompt has, by the usage; None where it was not told."""
    usage = None if piece is None else _usage.decode(piece)
    return None if usage is None else usage.prompt_tokens
