"""The routes that are served and recorded, and who reads each. Pure."""

from functools import partial

from proxy.wire import messages, messages_answer, responses, responses_answer
from proxy.wire.body import Body
from proxy.wire.chat import ChatAsked
from proxy.wire.completions import TextAsked
from proxy.wire.dialect import Asked
from proxy.wire.native import NativeAsked
from proxy.wire.translated import TranslatedAsked
from whetstone.reasons import WhyNotTrained

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})


def ask(path: str, body: Body, captured: bool) -> Asked:
    """Read a request of one of PATHS. `captured`: vLLM answers, which tells ids and logprobs.

    Raises:
        RefusedField: it would end the engine.
    """
    match path:
        case "/v1/chat/completions":
            return ChatAsked(body, captured)
        case "/v1/completions":
            return TextAsked(body, captured)
        case "/v1/messages":
            return _messages(body, captured)
        case "/v1/responses":
            return _responses(body, captured)
    raise ValueError(f"{path} is none of {PATHS}")


def _messages(body: Body, captured: bool) -> Asked:
    chat = messages.chat_of(body.values) if captured else None
    if chat is None:
        return _native("messages", body, captured)
    return TranslatedAsked(
        "messages",
        body,
        chat,
        answer_of=messages_answer.answer_of,
        events_of=messages_answer.MessageEvents,
        error_of=messages_answer.error_of,
    )


def _responses(body: Body, captured: bool) -> Asked:
    chat = responses.chat_of(body.values) if captured else None
    if chat is None:
        return _native("responses", body, captured)
    return TranslatedAsked(
        "responses",
        body,
        chat,
        answer_of=partial(responses_answer.answer_of, values=body.values),
        events_of=partial(responses_answer.ResponseEvents, body.values),
        error_of=responses_answer.error_of,
    )


def _native(endpoint: str, body: Body, captured: bool) -> NativeAsked:
    return NativeAsked(endpoint, body, WhyNotTrained.NO_TOKEN_IDS if captured else WhyNotTrained.DEMONSTRATION)
