"""Read what a model server reports about tokens: their ids, their logprobs, and the length of the prompt. Pure."""

import msgspec

from proxy.wire.interfaces import Number


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Number | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """The logprob of one sampled token, in nats."""

    logprob: float


class ChoiceLogprobs(msgspec.Struct, gc=False):
    """The part of a choice's logprobs that is recorded."""

    content: list[TokenLogprob] | None = None


_ids = msgspec.json.Decoder(list[Number] | None)
_logprobs = msgspec.json.Decoder(ChoiceLogprobs | None)
_usage = msgspec.json.Decoder(_Usage | None)


def read_ids(piece: msgspec.Raw | None) -> list[int] | None:
    """Return token ids as vLLM sends them, or None if it sent none."""
    return None if piece is None else _ids.decode(piece)


def read_logprobs(piece: msgspec.Raw | None) -> list[float] | None:
    """Return one logprob per sampled token, in nats, or None if vLLM sent none."""
    return None if piece is None else logprobs_of(_logprobs.decode(piece))


def logprobs_of(logprobs: ChoiceLogprobs | None) -> list[float] | None:
    """Return a choice's logprobs, one per sampled token, or None if vLLM sent none."""
    if logprobs is None or logprobs.content is None:
        return None
    content = logprobs.content
    # An event of a stream usually holds one token.
    return [content[0].logprob] if len(content) == 1 else [token.logprob for token in content]


def prompt_tokens_of(piece: msgspec.Raw | None) -> int | None:
    """Return the number of prompt tokens from the usage, or None if it was not reported."""
    usage = None if piece is None else _usage.decode(piece)
    return None if usage is None else usage.prompt_tokens
