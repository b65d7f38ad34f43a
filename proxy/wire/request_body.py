"""Read a body of any dialect: a JSON object with a model, and without fields that control the server. Pure.

`exploring` gives it another temperature.
"""

from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from proxy.domain.call import NULL
from proxy.domain.json_values import MAX_DEPTH, depth
from proxy.errors import BadRequest, NotJson, RefusedField
from proxy.wire.decoding import decode, encode, raw, read_object

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
"""Fields that control the server: they would forge ids, cross tenants, or run a template of the app's."""

DEADLY = frozenset({"prompt_logprobs"})
"""Fields that would stop vLLM's engine for everyone."""

LOOKED_AT = REFUSED | DEADLY | {"n", "best_of", "prompt"}
"""Fields for which a body may be refused; its media are another reason. Most bodies have none of these fields."""

_BESIDE_MESSAGES = ("input", "text_1", "text_2", "query", "documents")
"""Fields that may carry media, other than a chat's messages."""
_BESIDE = frozenset(_BESIDE_MESSAGES)
_OF_TEXTS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "reasoning",
        "reasoning_content",
    }
)
"""Fields of a message that hold no media, unless its content is a list of parts."""

_SMALL = 2 * MAX_DEPTH
"""Size in bytes up to which a body cannot be nested too deep, as each bracket needs another that closes it."""
_TEXTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_reference")
"""Types of parts of a message that are text (`TEXT_PART_TYPES` in vLLM's renderers/chat_utils.py)."""


class Body(msgspec.Struct, frozen=True):
    """A request's body, split into fields."""

    fields: dict[str, msgspec.Raw]
    """Every field, as it came."""
    values: dict[str, Any]
    """The same, decoded."""
    model: str
    texts_only: bool = False
    """Whether it is known to be a chat with nothing but text."""
    previous_response_id: str | None = None
    """The response that it continues, whose conversation stands in the input already."""

    @property
    def stream(self) -> bool:
        """Whether the answer is to be streamed."""
        return self.values.get("stream") is True

    @property
    def user(self) -> str | None:
        """The user that the app serves, from `user`."""
        user = self.values.get("user")
        return user if isinstance(user, str) else None

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null if it has none."""
        return self.fields.get("tools", NULL)

    def given(self, field: str) -> bool:
        """Return whether the field is there and not null."""
        return self.values.get(field) is not None

    def without(self, *names: str) -> bytes:
        """Return every field except these, as one JSON object."""
        remaining = self.fields.copy()
        for name in names:
            remaining.pop(name, None)
        return encode(remaining)

    def has_media(self) -> bool:
        """Return whether a message of the chat contains images, audio or files."""
        return not self.texts_only and _has_media(self.values.get("messages"))


def read_body(data: bytes, media_domains: Container[str] = (), max_choices: int = 256) -> Body:
    """Parse a body.

    Raises:
        NotJson: it is not a JSON object.
        BadRequest: `model` is missing or not a string, or it asks for so many choices that all other requests would
            wait.
        RefusedField: it has a field that controls the server, or media that the server would have to fetch.
    """
    try:
        fields = read_object(data)
        # Decoded as well, to detect what splitting does not: invalid UTF-8, and numbers that no float can hold.
        values: dict[str, Any] = decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error
    small = len(data) <= _SMALL
    if not small and _may_be_deep(data) and depth(values) > MAX_DEPTH:
        raise NotJson(f"the body is nested deeper than {MAX_DEPTH} levels")
    if not LOOKED_AT.isdisjoint(values):
        _check(values, max_choices)
    texts_only = not small and _of_texts(values)
    # JSON may spell a letter as \\u0075, so a body with an escape is searched too. (Python's `in` first tries to read
    # the bytes as a number, and raises and drops an error.)
    if not texts_only and (data.find(b"url") >= 0 or data.find(b"\\u") >= 0):
        for url in _media(values):
            _check_media(url, media_domains)
    model = values.get("model")
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string; GET /v1/models lists the names", param="model")
    return Body(fields, values, model, texts_only)


def _check(values: dict[str, Any], max_choices: int) -> None:
    for field in REFUSED & values.keys():
        raise RefusedField(f"{field!r} is a field of the server behind this proxy; leave it out", param=field)
    for field in DEADLY & values.keys():
        if values[field] is not None:
            raise deadly(field)
    # vLLM samples all choices of all prompts at once, while others wait.
    prompts = values.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    for field in ("n", "best_of"):
        wanted = whole(values.get(field)) or 1
        if wanted * several > max_choices:
            raise BadRequest(
                f"{wanted} choices for {several} prompts are over {max_choices} (proxy.max_choices)", param=field
            )


def whole(value: Any) -> int | None:
    """Return a whole number as vLLM reads it, also from 2.0 and "2", or None if the value is not one."""
    if isinstance(value, int | float | str):
        with suppress(ValueError, OverflowError):
            number = float(value)
            return int(number) if number.is_integer() else None
    return None


def deadly(field: str) -> RefusedField:
    """Return the error for a field that would stop vLLM's engine for everyone, because it makes vLLM compute the
    prompt's logprobs."""
    return RefusedField(f"{field!r} is not served here: it would stop the engine; leave it out", param=field)


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _integer(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


_UNUSED_AT_ZERO: dict[str, Callable[[Any], bool]] = {
    "top_p": lambda value: _number(0, 1)(value) and value > 0,
    "top_k": _integer(-1, 2**31 - 1),
    "min_p": _number(0, 1),
    "seed": _integer(-(2**63), 2**63 - 1),
}
"""Fields that vLLM ignores at temperature 0 (`SamplingParams.__post_init__`; a seed has nothing to draw), and the
values that it accepts."""


def exploring(body: Body, temperature: float) -> Body | None:
    """Return the body with this temperature in place of 0, without the fields that vLLM ignores at temperature 0.

    None if the temperature is not 0, or if vLLM refuses the body: the app is to get that error.
    """
    values = body.values
    stated = values.get("temperature")
    # At temperature 0 vLLM refuses more than one choice.
    if type(stated) not in (int, float) or stated != 0 or whole(values.get("n")) not in (None, 1):
        return None
    if not all(values.get(name) is None or is_valid(values[name]) for name, is_valid in _UNUSED_AT_ZERO.items()):
        return None
    fields = {name: piece for name, piece in body.fields.items() if name not in _UNUSED_AT_ZERO}
    used = {name: value for name, value in values.items() if name not in _UNUSED_AT_ZERO}
    return msgspec.structs.replace(
        body, fields=fields | {"temperature": raw(temperature)}, values=used | {"temperature": temperature}
    )


def _may_be_deep(data: bytes) -> bool:
    """Return whether there are enough brackets to be nested too deep."""
    # `count` looks at byte after byte; `replace` jumps from one bracket to the next.
    most = MAX_DEPTH + 1
    without = len(data.replace(b"[", b"", most)) + len(data.replace(b"{", b"", most))
    return 2 * len(data) - without > MAX_DEPTH


def _of_texts(values: dict[str, Any]) -> bool:
    """Return whether it is a chat with only texts, as most are, which has no place for media.

    For a body that is not small, checking its messages is faster than searching all its bytes.
    """
    messages = values.get("messages")
    if type(messages) is not list or not _BESIDE.isdisjoint(values):
        return False
    for message in messages:
        if type(message) is not dict:
            return False
        of_content = type(message.get("content"))
        # Most messages have a role and content and nothing else; this check takes half as long.
        if of_content is str and len(message) == 2 and "role" in message:
            continue
        if of_content is list or not _OF_TEXTS.issuperset(message):
            return False
    return True


def _has_media(messages: Any) -> bool:
    for message in messages if type(messages) is list else ():
        parts = message.get("content") if type(message) is dict else None
        for part in parts if type(parts) is list else ():
            # By its `uuid`, vLLM looks up media that it has read before, whatever the type.
            if type(part) is dict and (part.get("type") not in _TEXTS or "uuid" in part):
                return True
    return False


def _media(values: dict[str, Any]) -> Iterator[str]:
    """Yield the URLs of media in a conversation's content parts: OpenAI's `…_url`, Anthropic's `source`."""
    for field in ("messages", *_BESIDE_MESSAGES):
        items = values.get(field)
        for item in items if isinstance(items, list) else [items]:
            if isinstance(item, dict):
                yield from _of_parts([item, *as_list(item.get("content")), *as_list(item.get("output"))])


def _of_parts(parts: list[Any]) -> Iterator[str]:
    for part in [one for one in parts if isinstance(one, dict)]:
        for name, value in part.items():
            if name == "source" or name.endswith("_url"):
                url = value.get("url") if isinstance(value, dict) else value
                if isinstance(url, str):
                    yield url
        if part.get("type") == "tool_result":
            yield from _of_parts(as_list(part.get("content")))


def as_list(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def _check_media(url: str, domains: Container[str]) -> None:
    """Refuse media that the server would fetch for an app: the server can reach hosts that the app cannot."""
    if url[:5].lower() == "data:":
        return
    try:
        parts = urlsplit(url)
        allowed = parts.scheme in ("http", "https") and parts.hostname in domains
    except ValueError:
        allowed = False
    if not allowed:
        raise RefusedField(
            f"media at {url[:100]!r} is not fetched; send it as a data: URL (or allow its domain: proxy.media_domains)",
            param="messages",
        )
