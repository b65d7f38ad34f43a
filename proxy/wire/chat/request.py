"""Read a request to `/v1/chat/completions`: what goes to vLLM, and which parts of the answer to hide. Pure."""

from functools import lru_cache

import msgspec

from proxy.wire.chat.answer import read_answer
from proxy.wire.chat.stream import ChatStream
from proxy.wire.decoding import encode, raw_name, read_list
from proxy.wire.interfaces import Answer, Server
from proxy.wire.parameters import BUDGET, SampledRequest, grammar_of, lacks_usage, why_bent, with_usage
from proxy.wire.request_body import Body, deadly
from whetstone.domain.why_not_trained import WhyNotTrained

ANSWER_OPTIONS = frozenset(
    {"echo", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "include_reasoning"}
)  # fmt: skip
"""Fields that request more than the answer's text."""

_TRUE = msgspec.Raw(b"true")
_ZERO = msgspec.Raw(b"0")
_FLAG = (bool, type(None))
_OF_ANSWERS = ("assistant", None)


class ChatRequest(SampledRequest):
    """A chat request. If a server other than vLLM answers it (not `captured`), it is sent unchanged."""

    endpoint = "chat.completions"
    path = "/v1/chat/completions"

    capturable = True
    """False if the fields for capture would make an invalid request valid: it is then sent unchanged."""
    hides_reasoning = False
    """The app wants no reasoning; vLLM then returns no ids and no logprobs either."""
    wants_prompt_token_ids = wants_token_ids = wants_logprobs = False
    """Whether the app sees these if the answer has any."""
    hides_usage = False
    """The app did not request the last chunk of a stream, which reports the tokens."""

    def __init__(self, body: Body, server: Server = Server()) -> None:  # noqa: B008 - it is frozen
        """Read the request as far as capture needs.

        Raises:
            RefusedField: it would stop the engine.
        """
        values, fields = body.values, body.fields
        captured = server.captured
        super().__init__(body, captured)
        self.model = body.model
        self.stream = body.stream
        self.end_user = body.user
        self.tools_or_null = body.tools_or_null
        """The request's tools, as they came; JSON null if it has none."""
        self._tells = not ANSWER_OPTIONS.isdisjoint(values)
        """Whether the app requests more than the answer's text."""
        if self._tells or not captured:
            if captured and values.get("echo"):
                # vLLM makes prompt logprobs of top_logprobs, which is 0 where it is null or absent.
                raise deadly("echo")
            self.capturable = captured and _capturable(body)
            self.hides_reasoning = captured and values.get("include_reasoning") is False
            self.wants_prompt_token_ids = not self.capturable or values.get("return_token_ids") is True
            self.wants_token_ids = self.wants_prompt_token_ids and not self.hides_reasoning
            self.wants_logprobs = not self.capturable or (values.get("logprobs") is True and not self.hides_reasoning)
        if server.counts_usage:
            self.hides_usage = lacks_usage(body)
        try:
            self.messages = read_list(fields["messages"])
            """The conversation, message by message; empty if the request has none."""
        except (KeyError, msgspec.DecodeError):
            self.messages = []
        self.conversation = self.messages

    def may_continue(self) -> bool:
        """Return whether there is an answer in the conversation."""
        messages = self._body.values.get("messages")
        # Search from the end: if there is an answer, it is near.
        for message in reversed(messages) if type(messages) is list else ():
            # What has no role may be an item of an answer.
            if type(message) is dict and message.get("role") in _OF_ANSWERS:
                return True
        return False

    def sampling(self) -> bytes:
        """Return every other field, as one JSON object."""
        return self._original.without("model", "messages", "tools")

    def why_not_trained(self) -> str | None:
        """Return why no step may train on the answer, or None if it may."""
        if not self._for_vllm:
            return WhyNotTrained.DEMONSTRATION
        return WhyNotTrained.MEDIA if self._body.has_media() else why_bent(self._body.values)

    def to_upstream_body(self, served_name: str, cache_salt: str) -> bytes:
        """Return the body to send: the app's own fields, the adapter's name as model, and what capture needs."""
        fields = self._body.fields.copy()
        fields["model"] = raw_name(served_name)
        if self._for_vllm:
            fields["cache_salt"] = raw_name(cache_salt) if self._tells else _captured(cache_salt)
        if self._tells and self.capturable:
            fields["return_token_ids"] = _TRUE
            if self.hides_reasoning:
                fields["include_reasoning"] = _TRUE
            fields["logprobs"] = _TRUE
            # Absent would work, null would not: vLLM then computes no logprobs.
            if not self._body.given("top_logprobs"):
                fields["top_logprobs"] = _ZERO
        if self.hides_usage:
            fields["stream_options"] = with_usage(self._body)
        return encode(fields)

    def read(self, body: bytes) -> Answer:
        """Read a whole answer."""
        return read_answer(body, self)

    def new_stream(self) -> ChatStream:
        """Return the reader of a streamed answer."""
        return ChatStream(self)

    def error(self, body: bytes, status: int) -> bytes:
        """Return the body unchanged: an upstream error is already in this dialect."""
        return body


@lru_cache(64)
def _captured(cache_salt: str) -> msgspec.Raw:
    """Return the salt, followed by the other fields that a request without any of ANSWER_OPTIONS gets. A Raw is written
    as it is, and one piece is faster than four."""
    return msgspec.Raw(b'%b,"return_token_ids":true,"logprobs":true,"top_logprobs":0' % encode(cache_salt))


def _capturable(body: Body) -> bool:
    logprobs, token_ids = body.values.get("logprobs"), body.values.get("return_token_ids")
    needs_logprobs = bool(body.values.get("top_logprobs") or body.values.get("logprob_token_ids"))
    known = isinstance(logprobs, _FLAG) and isinstance(token_ids, _FLAG)
    return known and (logprobs is True or not needs_logprobs) and not _thinks_within_grammar(body)


def _thinks_within_grammar(body: Body) -> bool:
    """Return whether reasoning is hidden and a grammar is set. vLLM then applies the grammar from the first token on.

    Capture needs the reasoning. If it were requested, vLLM would let the model think first: other tokens than without
    the proxy.
    """
    return body.values.get("include_reasoning") is False and grammar_of(body.values) not in (None, BUDGET)
