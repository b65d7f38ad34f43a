"""What was asked: a chat request's bytes in, the bytes for vLLM out. Pure; fields it does not know pass as they are."""

from typing import Any

import msgspec

from proxy.call import NULL
from proxy.errors import BadRequest, NotJson, RefusedField

REFUSED = frozenset(
    {
        "request_id",
        "cache_salt",
        "priority",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "chat_template",
        "mm_processor_kwargs",
        "prompt_embeds",
    }
)
"""Fields that reach into the server: they would forge ids, cross tenants, or run a template of the app's."""

NOT_SAMPLING = frozenset({"model", "messages", "tools"})

TRAINABLE = frozenset(
    {
        "model",
        "messages",
        "tools",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "temperature",
        "user",
        "metadata",
        "return_token_ids",
        "include_reasoning",
    }
)
"""The closed list of fields that leave the logprobs those of the model at its temperature."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "tool_choice": ("auto", "none"),
}
"""Values at which a field bends nothing: the same as leaving it out."""

_TRUE = msgspec.Raw(b"true")
_ZERO = msgspec.Raw(b"0")
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class Asked(msgspec.Struct, frozen=True):
    """A chat request, read as far as capture needs."""

    fields: dict[str, msgspec.Raw]
    """Every field, as it came."""
    values: dict[str, Any]
    """The same decoded, but for messages and tools."""
    model: str

    @property
    def stream(self) -> bool:
        """Whether the answer comes as events."""
        return self.values.get("stream") is True

    @property
    def capturable(self) -> bool:
        """False where capture fields would make a request valid that is not: it then goes as it came."""
        flags = (self.values.get("logprobs"), self.values.get("return_token_ids"))
        needs_logprobs = bool(self.values.get("top_logprobs") or self.values.get("logprob_token_ids"))
        known = all(flag is None or isinstance(flag, bool) for flag in flags)
        return known and (flags[0] is True or not needs_logprobs)

    @property
    def hides_reasoning(self) -> bool:
        """The app wants no reasoning; vLLM then tells no ids and no logprobs either."""
        return self.values.get("include_reasoning") is False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the app sees logprobs where the answer has any."""
        return not self.capturable or (self.values.get("logprobs") is True and not self.hides_reasoning)

    @property
    def wants_token_ids(self) -> bool:
        """Whether the app sees the sampled ids where the answer has any."""
        return self.wants_prompt_token_ids and not self.hides_reasoning

    @property
    def wants_prompt_token_ids(self) -> bool:
        """Whether the app sees the prompt's ids where the answer has any."""
        return not self.capturable or self.values.get("return_token_ids") is True

    def for_upstream(self, served_name: str, cache_salt: str) -> bytes:
        """The body for vLLM: the app's own fields, the adapter's name as model, and what capture needs."""
        fields = dict(self.fields)
        fields["model"] = _raw(served_name)
        fields["cache_salt"] = _raw(cache_salt)
        if self.capturable:
            fields["return_token_ids"] = _TRUE
            if self.hides_reasoning:
                fields["include_reasoning"] = _TRUE
            if not self.values.get("echo"):
                fields["logprobs"] = _TRUE
                # Absent would do, null would not: vLLM then computes no logprobs.
                if self.values.get("top_logprobs") is None:
                    fields["top_logprobs"] = _ZERO
        if self.values.get("echo"):
            # With anything else, its default too, vLLM computes the prompt's logprobs: deadly.
            fields["top_logprobs"] = NULL
        return msgspec.json.encode(fields)

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, message by message; empty where the request has none."""
        try:
            return _list_decoder.decode(self.fields.get("messages", msgspec.Raw(b"[]")))
        except msgspec.DecodeError:
            return []

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null when it has none."""
        return self.fields.get("tools", NULL)

    @property
    def end_user(self) -> str | None:
        """The body's `user`."""
        user = self.values.get("user")
        return user if isinstance(user, str) else None

    def sampling(self) -> bytes:
        """Every other field, as one JSON object."""
        return msgspec.json.encode({key: raw for key, raw in self.fields.items() if key not in NOT_SAMPLING})

    def why_not_trained(self) -> str | None:
        """Why this call's logprobs are not those of the model at its temperature; None when they are.

        Returns `greedy`, or `sampling_bent: <field>` with the first field that bends.
        """
        temperature = self.values.get("temperature")
        if temperature is not None:
            if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
                return "sampling_bent: temperature"
            if temperature == 0:
                return "greedy"
        for field, value in self.values.items():
            if field not in TRAINABLE and value is not None and value not in NEUTRAL.get(field, ()):
                return f"sampling_bent: {field[:100]}"
        return None


def read_request(body: bytes) -> Asked:
    """Read a chat request.

    Raises:
        NotJson: the body is no JSON object.
        BadRequest: `model` is missing or no string.
        RefusedField: it carries a field that reaches into the server.
    """
    try:
        fields = _fields_decoder.decode(body)
        # Decoded once, for what cutting it up does not see: bytes that are no UTF-8, numbers that no float holds.
        values: dict[str, Any] = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error
    for field in REFUSED & values.keys():
        raise RefusedField(f"{field!r} is a field of the server behind this proxy; leave it out", param=field)
    if deadly := _deadly(values):
        raise RefusedField(f"{deadly!r} is not served here: it would stop the engine; leave it out", param=deadly)
    model = values.get("model")
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string; GET /v1/models lists the names", param="model")
    return Asked(fields, {key: value for key, value in values.items() if key not in ("messages", "tools")}, model)


def _deadly(values: dict[str, Any]) -> str | None:
    """The field that would end vLLM's engine for everybody: it computes the prompt's logprobs (CPU build, LoRA)."""
    if values.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if values.get("echo"):
        return next((field for field in ("logprobs", "top_logprobs") if values.get(field)), None)
    return None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
