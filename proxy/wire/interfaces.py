"""Define what every dialect provides: a parsed request, a parsed answer, a stream's events one by one. Types only."""

from functools import lru_cache
from typing import Annotated, Any, Protocol

import msgspec

from proxy.domain.call import Choice

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""What parsing an answer raises if the answer is not in its dialect."""


class Server(msgspec.Struct, frozen=True):
    """What is known about the server that answers."""

    captured: bool = True
    """It is our own vLLM, which returns token ids and logprobs."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None until the server has reported it."""


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


class Stream(Protocol):
    """One streamed answer: `feed` it what upstream sends, and send the app what it returns."""

    @property
    def upstream_id(self) -> str | None:
        """The answer's id, as the app sees it; None until it was sent."""

    @property
    def error(self) -> str | None:
        """The error that upstream reported within the stream."""

    @property
    def done(self) -> bool:
        """Whether upstream has sent its last event. The event that ends the stream for the app waits until the call is
        recorded."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrive, whole events or not. Return the events for the app, possibly none.

        Raises:
            UNREADABLE: an event is not in its dialect.
        """

    def last(self) -> bytes:
        """Return what ends the stream for the app, once it is done."""

    @property
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far."""


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

    def may_continue(self) -> bool:
        """Return whether the conversation may contain an answer that it continues. A quick check."""

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null if it has none."""

    def sampling(self) -> bytes:
        """Return every field that is neither model, conversation nor tools, as one JSON object."""

    def why_not_trained(self) -> str | None:
        """Return why the answer's logprobs will not be those of the model at its temperature, or None if they will."""

    def to_upstream_body(self, served_name: str, cache_salt: str) -> bytes:
        """Return the body to send."""

    def read(self, body: bytes) -> Answer:
        """Read a whole answer.

        Raises:
            UNREADABLE: it is not in this dialect.
        """

    def new_stream(self) -> Stream:
        """Return the reader of a streamed answer."""

    def error(self, body: bytes, status: int) -> bytes:
        """Return an upstream error in this dialect."""


read_text = msgspec.json.Decoder(str | None).decode
"""Decodes a piece of JSON that is a text or null."""
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A token id, or a choice's index: what SQL's integers hold."""
read_index = msgspec.json.Decoder(Number).decode
"""Decodes a piece of JSON that is a choice's index."""
read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Splits an object into its fields, as they came."""
read_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
"""Splits each object of a list into its fields."""


def raw(value: Any) -> msgspec.Raw:
    """Return the value as a piece of JSON."""
    return msgspec.Raw(_encode(value))


_encode = msgspec.json.Encoder().encode
raw_name = lru_cache(256)(raw)
"""The same, cached: for names that come again and again."""
