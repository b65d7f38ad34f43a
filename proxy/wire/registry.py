"""Name the dialect that reads each recorded route: `DIALECTS`. Pure."""

from collections.abc import Callable, Mapping
from functools import partial

from proxy.wire.anthropic import answer as message_answer
from proxy.wire.anthropic import request as message_request
from proxy.wire.chat.request import ChatRequest
from proxy.wire.completions import TextRequest
from proxy.wire.interfaces import DialectRequest, Server
from proxy.wire.passthrough import NativeRequest
from proxy.wire.request_body import Body
from proxy.wire.responses import answer as response_answer
from proxy.wire.responses import request as response_request
from proxy.wire.responses.stored import PREVIOUS, stored_of
from proxy.wire.responses.stream import ResponseEvents
from proxy.wire.translated import TranslatedRequest


def _message(body: Body, server: Server) -> DialectRequest:
    """Parse a message: as a chat, or for vLLM's own route if no chat stands for it.

    Raises:
        RefusedField: it would stop the engine.
    """
    message = message_request.translate(body.values, server.chat_rules) if server.takes_chats else None
    if message is None:
        return NativeRequest("messages", body, server)
    return TranslatedRequest(
        "messages",
        body,
        message.chat,
        server,
        answer_of=message_answer.answer_of,
        events_of=message_answer.MessageEvents,
        error_of=message_answer.error_of,
        conversation=message.conversation,
    )


def _response(body: Body, server: Server) -> DialectRequest:
    """Parse a request for a response in the same way.

    Raises:
        RefusedField: it would stop the engine.
    """
    length, previous = server.max_model_len, body.previous_response_id
    chat = response_request.chat_of(body.values, length) if server.takes_chats else None
    if chat is None or length is None:
        return NativeRequest("responses", body, server, previous)
    values = body.values if previous is None else body.values | {PREVIOUS: previous}
    return TranslatedRequest(
        "responses",
        body,
        chat,
        server,
        answer_of=partial(response_answer.answer_of, values=values, max_model_len=length),
        events_of=partial(ResponseEvents, values, length),
        error_of=partial(response_answer.error_of, max_model_len=length),
        id_of=response_answer.id_of,
        stored_of=partial(stored_of, values),
    )


DIALECTS: Mapping[str, Callable[[Body, Server], DialectRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": TextRequest,
    "/v1/messages": _message,
    "/v1/responses": _response,
}
"""Path -> what parses a request to it; each raises RefusedField if the request would stop the engine."""
