"""What every dialect gives: a request as asked, its answer taken apart, its events one by one. Only the shapes."""

from functools import lru_cache
from typing import Annotated, Any, Protocol

import msgspec

from proxy.call import Choice

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""What taking an answer apart raises where it is none of its dialect."""


class Server(msgspec.Struct, frozen=True):
    """What is known of the server that answers."""

    captured: bool = True
    """It is our vLLM, which tells ids and logprobs."""
    max_model_len: int | None = None
    """Tokens that prompt and answer may have together; None while it has not told."""


class Heard(msgspec.Struct, frozen=True):
    """What was said to one prompt: its choices share the prompt's ids. None: not told."""

    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]
    prompt: int = 0
    """Its place among the request's prompts; only `/v1/completions` takes several."""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    for_app: bytes
    upstream_id: str | None
    """Its id, as the app holds it."""
    heard: tuple[Heard, ...]
    status: int = 200
    """400 where the dialect has no words for what was said."""


class Stream(Protocol):
    """One streamed answer: `feed` it what upstream sends, send the app what it returns."""

    @property
    def upstream_id(self) -> str | None:
        """The answer's id, as the app holds it; None until it was told."""
        ...

    @property
    def error(self) -> str | None:
        """What upstream said went wrong, within the stream."""
        ...

    @property
    def done(self) -> bool:
        """Upstream has said its last event. What ends the stream for the app waits until the call is recorded."""
        ...

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they come, whole events or not; return the events for the app, possibly none.

        Raises:
            UNREADABLE: an event is none of its dialect.
        """
        ...

    def last(self) -> bytes:
        """What ends the stream for the app, once it is done."""
        ...

    @property
    def heard(self) -> tuple[Heard, ...]:
        """What was said so far."""
        ...


class Asked(Protocol):
    """A request, read as far as serving and recording need."""

    endpoint: str
    """As the tables name it."""
    path: str
    """Where it goes upstream."""
    model: str
    stream: bool
    end_user: str | None

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, message by message, as it came."""
        ...

    @property
    def conversation(self) -> list[msgspec.Raw]:
        """The same as chat messages, where there is a chat that stands for it."""
        ...

    def goes_on(self) -> bool:
        """Whether there may be an answer in the conversation, from which it goes on; soon told."""
        ...

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null when it has none."""
        ...

    def sampling(self) -> bytes:
        """Every field that is neither model, conversation nor tools, as one JSON object."""
        ...

    def why_not_trained(self) -> str | None:
        """Why the answer's logprobs will not be those of the model at its temperature; None when they will."""
        ...

    def for_upstream(self, served_name: str, cache_salt: str) -> bytes:
        """The body to send."""
        ...

    def read(self, body: bytes) -> Answer:
        """Take a whole answer apart.

        Raises:
            UNREADABLE: it is none of this dialect.
        """
        ...

    def events(self) -> Stream:
        """Take a streamed one apart."""
        ...

    def error(self, body: bytes, status: int) -> bytes:
        """An error of upstream's, as this dialect says it."""
        ...


read_text = msgspec.json.Decoder(str | None).decode
"""A piece of JSON that is a text or null."""
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A token id, or a choice's place: what SQL's integers hold."""
read_index = msgspec.json.Decoder(Number).decode
"""A piece of JSON that is a choice's place."""


def raw(value: Any) -> msgspec.Raw:
    """A piece of JSON."""
    return msgspec.Raw(_encode(value))


_encode = msgspec.json.Encoder().encode
raw_name = lru_cache(256)(raw)
"""The same of a name that is said again and again."""
