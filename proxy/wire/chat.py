"""`/v1/chat/completions` as asked: what goes to vLLM, and what of its answer the app did not ask for. Pure."""

from functools import lru_cache
from typing import Any

import msgspec

from proxy.wire.body import Body, deadly
from proxy.wire.chat_answer import read_answer
from proxy.wire.chat_events import ChatStream
from proxy.wire.dialect import Answer, raw_name
from proxy.wire.sampling import ALWAYS, why_bent
from whetstone.reasons import WhyNotTrained

HARMLESS = ALWAYS | {"messages", "tools", "max_completion_tokens", "top_logprobs", "include_reasoning"}
"""Fields of a chat that bend no logprobs."""
TELLING = frozenset(
    {"echo", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "include_reasoning"}
)  # fmt: skip
"""Fields that say what else is told than the answer."""

_TRUE = msgspec.Raw(b"true")
_ZERO = msgspec.Raw(b"0")
_FLAG = (bool, type(None))
_cut_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class ChatAsked:
    """A chat request. Where another server than vLLM answers (`captured` false) it goes as it came."""

    endpoint = "chat.completions"
    path = "/v1/chat/completions"

    capturable = True
    """False where capture fields would make a request valid that is not: it then goes as it came."""
    hides_reasoning = False
    """The app wants no reasoning; vLLM then tells no ids and no logprobs either."""
    wants_prompt_token_ids = wants_token_ids = wants_logprobs = False
    """Whether the app sees these where the answer has any."""

    def __init__(self, body: Body, captured: bool) -> None:
        """Read it as far as capture needs.

        Raises:
            RefusedField: it would end the engine.
        """
        values, fields = body.values, body.fields
        self._body = body
        self._for_vllm = captured
        self.model = body.model
        self.stream = body.stream
        self.end_user = body.user
        self.tools_or_null = body.tools_or_null
        """The request's tools, as they came; JSON null when it has none."""
        self._tells = not TELLING.isdisjoint(values)
        if self._tells or not captured:
            self._read_telling(values)
        try:
            self.messages = _cut_list(fields["messages"])
            """The conversation, message by message; empty where the request has none."""
        except (KeyError, msgspec.DecodeError):
            self.messages = []
        self.conversation = self.messages

    def _read_telling(self, values: dict[str, Any]) -> None:
        """What is told, where that is not what most are told: the answer alone."""
        # vLLM makes prompt logprobs of top_logprobs, which is 0 where it is null or absent.
        if self._for_vllm and values.get("echo"):
            raise deadly("echo")
        self.capturable = self._for_vllm and _capturable(self._body)
        self.hides_reasoning = self._for_vllm and values.get("include_reasoning") is False
        self.wants_prompt_token_ids = not self.capturable or values.get("return_token_ids") is True
        self.wants_token_ids = self.wants_prompt_token_ids and not self.hides_reasoning
        self.wants_logprobs = not self.capturable or (values.get("logprobs") is True and not self.hides_reasoning)

    def goes_on(self) -> bool:
        """Whether there is an answer in the conversation."""
        messages = self._body.values.get("messages")
        # From its end: where there is one, it is near.
        for message in reversed(messages) if type(messages) is list else ():
            if type(message) is dict and message.get("role") == "assistant":
                return True
        return False

    def sampling(self) -> bytes:
        """Every other field, as one JSON object."""
        return self._body.without("model", "messages", "tools")

    def why_not_trained(self) -> str | None:
        """Which field bends its logprobs; None when none does."""
        if not self._for_vllm:
            return WhyNotTrained.DEMONSTRATION
        bent = why_bent(self._body.values, HARMLESS)
        return bent or ("sampling_bent: tools" if _strict_tools(self._body.values) else None)

    def for_upstream(self, served_name: str, cache_salt: str) -> bytes:
        """The body to send: the app's own fields, the adapter's name as model, and what capture needs."""
        fields = self._body.fields.copy()
        fields["model"] = raw_name(served_name)
        if self._for_vllm and not self._tells:
            fields["cache_salt"] = _captured(cache_salt)
            return _encode(fields)
        if self._for_vllm:
            fields["cache_salt"] = raw_name(cache_salt)
        if self.capturable:
            fields["return_token_ids"] = _TRUE
            if self.hides_reasoning:
                fields["include_reasoning"] = _TRUE
            fields["logprobs"] = _TRUE
            # Absent would do, null would not: vLLM then computes no logprobs.
            if not self._body.given("top_logprobs"):
                fields["top_logprobs"] = _ZERO
        return _encode(fields)

    def read(self, body: bytes) -> Answer:
        """Take a whole answer apart."""
        return read_answer(body, self)

    def events(self) -> ChatStream:
        """Take a streamed one apart."""
        return ChatStream(self)

    def error(self, body: bytes, status: int) -> bytes:
        """An error of upstream's is in this dialect already."""
        return body


@lru_cache(64)
def _captured(cache_salt: str) -> msgspec.Raw:
    """The salt, and behind it the other fields that are added to a request with none of TELLING: what is Raw is written
    as it is, in one piece sooner than in four."""
    return msgspec.Raw(b'%b,"return_token_ids":true,"logprobs":true,"top_logprobs":0' % _encode(cache_salt))


def _strict_tools(values: dict[str, Any]) -> bool:
    """Whether a tool's arguments are held by a grammar: vLLM (0.32) does so for `strict` ones, with `auto` too."""
    tools = values.get("tools")
    if not tools or not isinstance(tools, list) or values.get("tool_choice") == "none":
        return False
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            return True
    return False


def _capturable(body: Body) -> bool:
    logprobs, token_ids = body.values.get("logprobs"), body.values.get("return_token_ids")
    needs_logprobs = bool(body.values.get("top_logprobs") or body.values.get("logprob_token_ids"))
    known = isinstance(logprobs, _FLAG) and isinstance(token_ids, _FLAG)
    return known and (logprobs is True or not needs_logprobs) and not _thinks_within_grammar(body)


def _thinks_within_grammar(body: Body) -> bool:
    """Whether reasoning is hidden and a grammar set: vLLM then holds it from the first token on.

    Asked to tell the reasoning, which capture needs, it would let the model think first: other tokens than without us.
    """
    values = body.values
    return values.get("include_reasoning") is False and (
        body.given("structured_outputs")
        or (body.given("response_format") and values["response_format"] != {"type": "text"})
        or (body.given("tool_choice") and values["tool_choice"] not in ("auto", "none"))
    )
