"""The routes that are served and recorded, and who reads each. Pure."""

from functools import partial

from proxy.wire import messages, messages_answer, responses, responses_answer
from proxy.wire.body import Body
from proxy.wire.chat import ChatAsked
from proxy.wire.completions import TextAsked
from proxy.wire.dialect import Asked, Server
from proxy.wire.native import NativeAsked
from proxy.wire.responses_events import ResponseEvents
from proxy.wire.translated import TranslatedAsked

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})


def ask(path: str, body: Body, server: Server) -> Asked:
    """Read a request of one of PATHS.

    Raises:
        RefusedField: it would end the engine.
    """
    match path:
        case "/v1/chat/completions":
            return ChatAsked(body, server.captured)
        case "/v1/completions":
            return TextAsked(body, server.captured)
        case "/v1/messages":
            return _messages(body, server)
        case "/v1/responses":
            return _responses(body, server)
    raise ValueError(f"{path} is none of {PATHS}")


def _messages(body: Body, server: Server) -> Asked:
    chat = messages.chat_of(body.values) if server.captured else None
    if chat is None:
        return NativeAsked("messages", body, server)
    return TranslatedAsked(
        "messages",
        body,
        chat,
        answer_of=messages_answer.answer_of,
        events_of=messages_answer.MessageEvents,
        error_of=messages_answer.error_of,
    )


def _responses(body: Body, server: Server) -> Asked:
    length = server.max_model_len
    chat = responses.chat_of(body.values, length) if server.captured else None
    if chat is None or length is None:
        return NativeAsked("responses", body, server)
    return TranslatedAsked(
        "responses",
        body,
        chat,
        answer_of=partial(responses_answer.answer_of, values=body.values, max_model_len=length),
        events_of=partial(ResponseEvents, body.values, length),
        error_of=responses_answer.error_of,
        id_of=responses_answer.id_of,
    )
