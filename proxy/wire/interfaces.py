"""Define what every dialect provides: a parsed request, a parsed answer, and the reader of a stream. Pure."""

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from proxy.domain.call import Choice
from proxy.domain.chat_rules import ChatRules

if TYPE_CHECKING:
    from proxy.wire.decoding import Stream

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
    counts_usage: bool = False
    """It is another server whose answers have a price, so that streams must report their tokens too."""
    is_teacher: bool = False
    """It is another server that answers in the place of ours."""

    @property
    def takes_chats(self) -> bool:
        """Whether a request of another dialect is sent as the chat that stands for it, if there is one; else it is sent
        as it came. A teacher gets chats as ours does: so a conversation has one form for both."""
        return self.captured or self.is_teacher


class PromptResult(msgspec.Struct, frozen=True):
    """What was answered to one prompt; its choices share the prompt's ids. None: not reported."""

    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]
    prompt: int = 0
    """The prompt's index in the request; only `/v1/completions` takes several."""
    answer_tokens: int | None = None
    """Tokens of all answers of the request, which the first prompt has."""

    def counted(self) -> tuple[Choice, ...]:
        """Return the choices, each with its number of tokens. Of choices without ids only the sum is reported: each
        gets an equal part."""
        tokens, choices = self.answer_tokens, self.choices
        if tokens is None:
            return choices
        each, more = divmod(tokens, len(choices) or 1)
        return tuple(
            one if one.token_ids is not None else msgspec.structs.replace(one, sampled=each + (place < more))
            for place, one in enumerate(choices)
        )


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
