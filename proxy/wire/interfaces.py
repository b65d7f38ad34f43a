"""Define what every dialect provides: a parsed request, a parsed answer, and the reader of a stream (`sse`). Pure.

Also the decoders that dialects share: of pieces of JSON, and of what a model server reports about tokens.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from proxy.domain.call import Choice
from proxy.domain.chat_rules import ChatRules

if TYPE_CHECKING:
    from proxy.wire.sse import Stream

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""What parsing an answer raises if the answer is not in its dialect."""


class Server(msgspec.Struct, frozen=True):
    """What is known about the server that answers."""

    captured: bool = True
    """It is our own vLLM, which returns token ids and logprobs."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None until the server has reported it."""
    chat_rules: ChatRules = ChatRules()
    """How it makes a chat of Anthropic messages."""


class PromptResult(msgspec.Struct, frozen=True):
    """What was answered to one prompt; its choices share the prompt's ids. None: not reported."""

    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]
    prompt: int = 0
    """The prompt's index in the request; only `/v1/completions` takes several."""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    client_body: bytes
    upstream_id: str | None
    """The answer's id, as the app sees it."""
    results: tuple[PromptResult, ...]
    status: int = 200
    """400 if the dialect cannot express the answer."""
    stored: dict[str, Any] | None = None
    """What the record lacks to give the answer again by its id; None if no request may ask for that."""


class DialectRequest(Protocol):
    """A request, parsed as far as serving and recording need."""

    endpoint: str
    """As in the tables."""
    path: str
    """The path to send it to upstream."""
    model: str
    stream: bool
    end_user: str | None

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, message by message, as it came."""

    @property
    def conversation(self) -> list[msgspec.Raw]:
        """The same as chat messages, if a chat stands for it."""

    def explore(self, temperature: float) -> bool:
        """Sample at this temperature if the app set 0, so that the answer can be trained on.

        Return False, and change nothing, if the app did not, or if something else keeps the answer from training.
        """

    def may_continue(self) -> bool:
        """Return whether the conversation may contain an answer that it continues. A quick check."""

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null if it has none."""

    def sampling(self) -> bytes:
        """Return every field of the app's that is neither model, conversation nor tools, as one JSON object."""

    def why_not_trained(self) -> str | None:
        """Return why no step may train on the answer, or None if it may."""

    def constraints(self) -> dict[str, Any] | None:
        """Return what bends the distribution that the answer is sampled from (the column `constraints`), or None if
        nothing does."""

    def to_upstream_body(self, served_name: str, cache_salt: str) -> bytes:
        """Return the body to send."""

    def read(self, body: bytes) -> Answer:
        """Read a whole answer.

        Raises:
            UNREADABLE: it is not in this dialect.
        """

    def new_stream(self) -> "Stream":
        """Return the reader of a streamed answer."""

    def error(self, body: bytes, status: int) -> bytes:
        """Return an upstream error in this dialect."""


Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A token id, or a choice's index: what SQL's integers hold."""

decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode
read_text = msgspec.json.Decoder(str | None).decode
"""Decodes a piece of JSON that is a text or null."""
read_index = msgspec.json.Decoder(Number).decode
"""Decodes a piece of JSON that is a choice's index."""
read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""Splits a list into its items, as they came."""
read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Splits an object into its fields, as they came."""
read_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
"""Splits each object of a list into its fields."""


def raw(value: Any) -> msgspec.Raw:
    """Return the value as a piece of JSON."""
    return msgspec.Raw(encode(value))


raw_name = lru_cache(256)(raw)
"""The same, cached: for names that come again and again."""


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
