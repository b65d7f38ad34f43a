"""Choose the dialect that reads each recorded route. Pure."""

from functools import partial

from proxy.domain.address import RECORDED
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


def parse_request(path: str, body: Body, server: Server, previous_response_id: str | None = None) -> DialectRequest:
    """Parse a request to one of the paths in `RECORDED`. `previous_response_id`: the response that it continues, which
    is already in the body's input.

    Raises:
        RefusedField: it would stop the engine.
    """
    match path:
        case "/v1/chat/completions":
            return ChatRequest(body, server.captured)
        case "/v1/completions":
            return TextRequest(body, server.captured)
        case "/v1/messages":
            message = message_request.translate(body.values, server.chat_rules) if server.captured else None
            if message is None:
                return NativeRequest("messages", body, server)
            return TranslatedRequest(
                "messages",
                body,
                message.chat,
                answer_of=message_answer.answer_of,
                events_of=message_answer.MessageEvents,
                error_of=message_answer.error_of,
                conversation=message.conversation,
            )
        case "/v1/responses":
            length = server.max_model_len
            chat = response_request.chat_of(body.values, length) if server.captured else None
            if chat is None or length is None:
                return NativeRequest("responses", body, server, previous_response_id)
            values = body.values
            if previous_response_id is not None:
                values = values | {PREVIOUS: previous_response_id}
            return TranslatedRequest(
                "responses",
                body,
                chat,
                answer_of=partial(response_answer.answer_of, values=values, max_model_len=length),
                events_of=partial(ResponseEvents, values, length),
                error_of=partial(response_answer.error_of, max_model_len=length),
                id_of=response_answer.id_of,
                stored_of=partial(stored_of, values),
            )
    raise ValueError(f"{path} is none of {RECORDED}")
