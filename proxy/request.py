"""What was asked: a chat request's bytes in, the bytes for vLLM out. Pure; fields it does not know pass as they are."""

from typing import Any

import msgspec

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

DEADLY = frozenset({"prompt_logprobs"})
"""Fields that end vLLM's engine for everybody (its CPU build with LoRA)."""

NOT_SAMPLING = frozenset({"model", "messages", "tools"})

TRAINABLE = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
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
    model: str
    stream: bool
    wants_logprobs: bool
    wants_token_ids: bool
    capturable: bool
    """False where capture fields would change the answer: the request then goes as it came."""

    def for_upstream(self, served_name: str, cache_salt: str) -> bytes:
        """The body for vLLM: the app's own fields, the adapter's name as model, and what capture needs."""
        fields = dict(self.fields)
        fields["model"] = _raw(served_name)
        fields["cache_salt"] = _raw(cache_salt)
        if self.capturable:
            fields["return_token_ids"] = _TRUE
            fields["logprobs"] = _TRUE
            # Absent would do, null would not: vLLM then computes no logprobs.
            if _value(fields.get("top_logprobs")) is None:
                fields["top_logprobs"] = _ZERO
            fields["include_reasoning"] = _TRUE
        return msgspec.json.encode(fields)

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The conversation, message by message; empty where the request has none."""
        try:
            return _list_decoder.decode(self.fields.get("messages", msgspec.Raw(b"[]")))
        except msgspec.DecodeError:
            return []

    @property
    def tools(self) -> msgspec.Raw | None:
        """The request's tools, as they came."""
        return self.fields.get("tools")

    @property
    def end_user(self) -> str | None:
        """The body's `user`."""
        user = _value(self.fields.get("user"))
        return user if isinstance(user, str) else None

    def sampling(self) -> bytes:
        """Every other field, as one JSON object."""
        return msgspec.json.encode({key: raw for key, raw in self.fields.items() if key not in NOT_SAMPLING})

    def why_not_trained(self) -> str | None:
        """Why this call's logprobs are not those of the model at its temperature; None when they are.

        Returns `greedy`, or `sampling_bent: <field>` with the first field that bends.
        """
        temperature = _value(self.fields.get("temperature"))
        if temperature is not None:
            if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
                return "sampling_bent: temperature"
            if temperature == 0:
                return "greedy"
        for field, raw in self.fields.items():
            if field in TRAINABLE and field not in NEUTRAL:
                continue
            value = _value(raw)
            if value is not None and value not in NEUTRAL.get(field, ()):
                return f"sampling_bent: {field}"
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error
    for field in fields:
        if field in REFUSED:
            raise RefusedField(f"{field!r} is a field of the server behind this proxy; leave it out", param=field)
        if field in DEADLY and _value(fields[field]) is not None:
            raise RefusedField(f"{field!r} is not served here: it would stop the engine; leave it out", param=field)
    model = _value(fields.get("model"))
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string; GET /v1/models lists the names", param="model")
    wants_logprobs = _value(fields.get("logprobs")) is True
    return Asked(
        fields=fields,
        model=model,
        stream=_value(fields.get("stream")) is True,
        wants_logprobs=wants_logprobs,
        wants_token_ids=_value(fields.get("return_token_ids")) is True,
        # Injected logprobs would make a request valid that is not.
        capturable=wants_logprobs or not _value(fields.get("top_logprobs")),
    )


def _value(raw: msgspec.Raw | None) -> Any:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotJson(f"the body is no JSON: {error}") from error


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
