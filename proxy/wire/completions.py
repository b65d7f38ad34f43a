"""Serve `/v1/completions`: text in, text out, with token ids and logprobs captured. Pure.

A request may have several prompts; each is its own conversation. vLLM numbers the choices across prompts: those of
prompt p are p·n to p·n + n - 1.
"""

from typing import Any

import msgspec

from proxy.domain.call import NULL, Choice
from proxy.wire.chat.stream import GrowingChoice
from proxy.wire.decoding import (
    ChunkStream,
    encode,
    raw,
    read_ids,
    read_index,
    read_object,
    read_objects,
    read_text,
    usage_of,
)
from proxy.wire.interfaces import Answer, PromptResult, Server
from proxy.wire.parameters import SampledRequest, lacks_usage, why_bent, with_usage
from proxy.wire.request_body import Body, deadly, whole
from whetstone.domain.why_not_trained import WhyNotTrained


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


_logprobs = msgspec.json.Decoder(_Logprobs | None)


class TextRequest(SampledRequest):
    """A request for a completion. If a server other than vLLM answers it (not `captured`), it is sent
    unchanged."""

    endpoint = "completions"
    path = "/v1/completions"
    tools_or_null = NULL
    """A completion has no tools."""

    def __init__(self, body: Body, server: Server = Server()) -> None:  # noqa: B008 - it is frozen
        """Read the request as far as capture needs.

        Raises:
            RefusedField: it would stop the engine.
        """
        values = body.values
        captured = server.captured
        super().__init__(body, captured)
        if values.get("echo") and values.get("logprobs") is not None:
            raise deadly("logprobs")
        self.model = body.model
        self.stream = body.stream
        self.end_user = body.user
        self.choices_a_prompt = max(whole(values.get("n")) or 1, 1)
        given = values.get("return_token_ids")
        # An echo with ids has no text, and a beam has no logprobs of its own. A flag of the wrong type must stay an
        # error.
        self.capturable = (
            captured
            and not values.get("echo")
            and not values.get("use_beam_search")
            and not values.get("logprob_token_ids")
            and (given is None or isinstance(given, bool))
        )
        self.wants_token_ids = not self.capturable or given is True
        """Whether the app sees token ids if the answer has any."""
        self.wants_logprobs = not self.capturable or values.get("logprobs") is not None
        self.hides_usage = server.counts_usage and lacks_usage(body)
        """Whether the app did not request the last chunk of a stream, which reports the tokens."""

    @property
    def prompts(self) -> list[Any]:
        """The request's prompts: texts or lists of ids."""
        prompt = self._body.values.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return prompt
        return [prompt]

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The prompts, one message each: `{"prompt": text or ids}`."""
        return [raw({"prompt": prompt}) for prompt in self.prompts]

    conversation = messages

    def may_continue(self) -> bool:
        """Return False: a prompt has no answers that can be recognised."""
        return False

    def sampling(self) -> bytes:
        """Return every field except model and prompt."""
        return self._original.without("model", "prompt")

    def why_not_trained(self) -> str | None:
        """Return why no step may train on the answer, or None if it may."""
        if not self._for_vllm:
            return WhyNotTrained.DEMONSTRATION
        return WhyNotTrained.NO_LOGPROBS if self._body.values.get("echo") else why_bent(self._body.values)

    def to_upstream_body(self, served_name: str, cache_salt: str) -> bytes:
        """Return the body to send: the app's own fields, the adapter's name as model, and what capture needs."""
        fields = dict(self._body.fields)
        fields["model"] = raw(served_name)
        if self._for_vllm:
            fields["cache_salt"] = raw(cache_salt)
        if self.capturable:
            fields["return_token_ids"] = raw(True)
            if not self._body.given("logprobs"):
                fields["logprobs"] = raw(0)
        if self.hides_usage:
            fields["stream_options"] = with_usage(self._body)
        return encode(fields)

    def read(self, body: bytes) -> Answer:
        """Read a whole answer."""
        fields, stream = read_object(body), TextStream(self)
        if "choices" not in fields:
            raise KeyError("choices")
        stream._take(fields)
        return Answer(encode(fields), read_text(fields.get("id", NULL)), stream.results)

    def new_stream(self) -> "TextStream":
        """Return the reader of a streamed answer."""
        return TextStream(self)

    def error(self, body: bytes, status: int) -> bytes:
        """Return the body unchanged: an upstream error is already in this dialect."""
        return body


class TextStream(ChunkStream):
    """The state of one streamed completion. A whole answer is read as if it were the only chunk."""

    def __init__(self, request: TextRequest) -> None:
        super().__init__()
        self._request = request
        self._choices: dict[int, GrowingChoice] = {}
        self._prompt_token_ids: dict[int, list[int]] = {}
        self._usage: tuple[int | None, int | None] = None, None
        """Tokens of all prompts and of all choices."""

    @property
    def results(self) -> tuple[PromptResult, ...]:
        """What was answered so far, for each prompt, including prompts without an answer."""
        n, prompts = self._request.choices_a_prompt, range(max(len(self._request.prompts), 1))
        return tuple(self._result_of(prompt, range(prompt * n, prompt * n + n)) for prompt in prompts)

    def _take(self, fields: dict[str, msgspec.Raw]) -> bool:
        has_usage = fields.get("usage", NULL) != NULL
        if has_usage:
            self._usage = usage_of(fields["usage"])
        if "choices" in fields:
            choices = read_objects(fields["choices"])
            if has_usage and not choices and self._request.hides_usage:
                return False
            for choice in choices:
                self._add(choice)
                # Remove what capture added, leaving the nulls that vLLM would have sent without it.
                if not self._request.wants_token_ids:
                    for name in ("token_ids", "prompt_token_ids"):
                        if name in choice:
                            choice[name] = NULL
                if not self._request.wants_logprobs:
                    choice["logprobs"] = NULL
            fields["choices"] = raw(choices)
        if "model" in fields:
            fields["model"] = raw(self._request.model)
        return True

    def _add(self, piece: dict[str, msgspec.Raw]) -> None:
        """Record a choice, or a piece of one."""
        index = read_index(piece["index"])
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = GrowingChoice()
        choice.texts["content"].append(read_text(piece.get("text", NULL)) or "")
        logprobs = _logprobs.decode(piece.get("logprobs", NULL))
        # The first token of an echoed prompt has none. The logprobs are then fewer than the tokens, which is checked
        # later.
        known = None if logprobs is None else [one for one in logprobs.token_logprobs if one is not None]
        choice.add_tokens(read_ids(piece.get("token_ids")), known)
        choice.finish_reason = read_text(piece.get("finish_reason", NULL)) or choice.finish_reason
        if (prompt_ids := read_ids(piece.get("prompt_token_ids"))) is not None:
            self._prompt_token_ids[index // self._request.choices_a_prompt] = prompt_ids

    def _result_of(self, prompt: int, indexes: range) -> PromptResult:
        choices = tuple(self._choices[index].frozen(index) for index in indexes if index in self._choices)
        read, answered = self._usage
        is_alone = len(self._request.prompts) <= 1
        # vLLM returns each prompt's ids; of another server only the sum is known, which the first prompt gets.
        has_sum = is_alone or (prompt == 0 and not self._request.capturable)
        return PromptResult(
            self._prompt_token_ids.get(prompt),
            read if has_sum else None,
            choices or (Choice(indexes.start, {}),),
            prompt,
            answered if prompt == 0 else None,
        )
