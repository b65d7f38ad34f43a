"""Serve a dialect that vLLM answers without ids, by sending the chat that vLLM itself would make. Pure.

The chat is captured like any other, and the answer is translated back into the dialect. Requests that `chat_of` does
not cover exactly go to `passthrough`.
"""

from collections.abc import Callable
from typing import Any, Protocol

from proxy.wire.chat.request import ChatRequest
from proxy.wire.chat.stream import ChatStream
from proxy.wire.decoding import data_of, decode, encode, raw
from proxy.wire.interfaces import Answer, Server
from proxy.wire.passthrough import MessagesOrResponses
from proxy.wire.request_body import Body

OF_VLLM = frozenset({"return_token_ids", "skip_special_tokens", "truncate_prompt_tokens"})
"""Fields of the chat that only vLLM knows, and without which another server answers the same."""


class Back(Protocol):
    """Translates a streamed chat back into a dialect."""

    def feed(self, chunk: dict[str, Any]) -> bytes:
        """Return the dialect's events for one chunk."""

    def error(self, error: dict[str, Any]) -> bytes:
        """Return the dialect's events for an error within the stream."""

    def end(self) -> bytes:
        """Return what ends the stream."""

    @property
    def response(self) -> dict[str, Any] | None:
        """The whole answer after the end, if the dialect can give it again by its id."""


def _nothing(_answer: dict[str, Any]) -> None:
    """Store nothing: only the Responses dialect has requests that name earlier answers."""


class TranslatedRequest(MessagesOrResponses):
    """A request of a dialect, and the chat that stands for it."""

    path = ChatRequest.path

    def __init__(
        self,
        endpoint: str,
        body: Body,
        chat: dict[str, Any],
        server: Server,
        answer_of: Callable[[dict[str, Any]], dict[str, Any]],
        events_of: Callable[[], Back],
        error_of: Callable[[bytes, int], bytes],
        id_of: Callable[[str], str] = str,
        conversation: list[dict[str, Any]] | None = None,
        stored_of: Callable[[dict[str, Any]], dict[str, Any] | None] = _nothing,
    ) -> None:
        """`chat` stands for `body`; `answer_of` to `id_of` translate the answer, the stream, the errors and the
        answer's id back. `conversation`: the messages by which a later request is recognised; None: the chat's.
        `stored_of` returns what is stored of an answer beside the record."""
        super().__init__(endpoint, body)
        if not server.captured:
            chat = {name: value for name, value in chat.items() if name not in OF_VLLM}
        pieces = {name: raw(value) for name, value in chat.items()}
        self._chat = request = ChatRequest(Body(pieces, chat, body.model, body.texts_only), server)
        self._answer_of, self._events_of, self._id_of, self._stored_of = answer_of, events_of, id_of, stored_of
        self.error = error_of
        self.conversation = request.messages if conversation is None else list(map(raw, conversation))
        # What the server gets is the chat, so the chat decides these.
        self.explore = request.explore
        self.may_continue = request.may_continue
        self.why_not_trained = request.why_not_trained
        self.constraints = request.constraints
        self.to_upstream_body = request.to_upstream_body

    def read(self, body: bytes) -> Answer:
        """Read a whole answer."""
        answer = self._chat.read(body)
        upstream_id = None if answer.upstream_id is None else self._id_of(answer.upstream_id)
        chat = decode(answer.client_body)
        try:
            whole = self._answer_of(chat)
            return Answer(encode(whole), upstream_id, answer.results, stored=self._stored_of(whole))
        except ValueError as error:
            refused = encode({"error": {"message": str(error), "type": "BadRequestError"}})
            return Answer(self.error(refused, 400), upstream_id, answer.results, status=400)

    def new_stream(self) -> "TranslatedStream":
        """Return the reader of a streamed answer."""
        return TranslatedStream(self._chat, self._events_of(), self._id_of, self._stored_of)


class TranslatedStream(ChatStream):
    """The state of one streamed answer: the chat's, translated back event by event."""

    def __init__(
        self,
        chat: ChatRequest,
        back: Back,
        id_of: Callable[[str], str],
        stored_of: Callable[[dict[str, Any]], dict[str, Any] | None],
    ) -> None:
        super().__init__(chat)
        self._back, self._id_of, self._stored_of = back, id_of, stored_of

    def last(self) -> bytes:
        """Return what ends the stream in this dialect."""
        last = self._back.end()
        self.stored = None if self._back.response is None else self._stored_of(self._back.response)
        return last

    def _named(self, upstream_id: str | None) -> str | None:
        return None if upstream_id is None else self._id_of(upstream_id)

    def _pass(self, event: bytes) -> bytes:
        """Return the dialect's events for one of the chat's, possibly none."""
        data = data_of(super()._pass(event))
        if data is None:
            return b""
        chunk: dict[str, Any] = decode(data)
        return self._back.error(chunk["error"]) if "error" in chunk else self._back.feed(chunk)
