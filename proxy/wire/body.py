"""A request's body, before any dialect: a JSON object with a model, and nothing that reaches into the server. Pure."""

from collections.abc import Container, Iterator
from typing import Any
from urllib.parse import urlsplit

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

LOOKED_AT = REFUSED | {"prompt_logprobs", "n", "best_of", "prompt"}
"""Fields by which a body may be refused, beside its media; most bodies have none of them."""

_BESIDE_MESSAGES = ("input", "text_1", "text_2", "query", "documents")
"""Fields that may carry media, but for a chat's own."""
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
"""Fields of a message that name no media, where its content is no list of parts."""

MAX_DEPTH = 200
"""Deepest nesting of a body: what comes after us, vLLM's JSON reader and SQL's, goes by Python's stack."""
_SMALL = 2 * MAX_DEPTH
"""Bytes of a body that cannot be nested deeper, as each bracket has another that ends it."""

_cut = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Body(msgspec.Struct, frozen=True):
    """A request's body, cut into fields."""

    fields: dict[str, msgspec.Raw]
    """Every field, as it came."""
    values: dict[str, Any]
    """The same, decoded."""
    model: str

    @property
    def stream(self) -> bool:
        """Whether the answer is to come event by event."""
        return self.values.get("stream") is True

    @property
    def user(self) -> str | None:
        """Whom the app serves, by its `user`."""
        user = self.values.get("user")
        return user if isinstance(user, str) else None

    @property
    def tools_or_null(self) -> msgspec.Raw:
        """The request's tools, as they came; JSON null when it has none."""
        return self.fields.get("tools", NULL)

    def given(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(field) is not None

    def without(self, *names: str) -> bytes:
        """Every field but these, as one JSON object."""
        kept = self.fields.copy()
        for name in names:
            kept.pop(name, None)
        return _encode(kept)


def read_body(data: bytes, media_domains: Container[str] = (), max_choices: int = 256) -> Body:
    """Read a body.

    Raises:
        NotJson: it is no JSON object.
        BadRequest: `model` is missing or no string; or so many answers are asked for that all others would wait.
        RefusedField: it carries a field that reaches into the server, or media that the server would have to fetch.
    """
    try:
        fields = _cut(data)
        # Decoded as well, for what cutting it up does not see: bytes that are no UTF-8, numbers that no float holds.
        values: dict[str, Any] = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error
    small = len(data) <= _SMALL
    if not small and _may_be_deep(data) and depth(values) > MAX_DEPTH:
        raise NotJson(f"the body is nested deeper than {MAX_DEPTH} levels")
    if not LOOKED_AT.isdisjoint(values):
        _check(values, max_choices)
    # JSON may spell a letter as \\u0075: what has an escape is looked through too. (Python's `in` asks first whether
    # the bytes are a number, and makes an error of it for nobody.)
    if (small or not _of_texts(values)) and (data.find(b"url") >= 0 or data.find(b"\\u") >= 0):
        for url in _media(values):
            _check_media(url, media_domains)
    model = values.get("model")
    if not isinstance(model, str):
        raise BadRequest("`model` must be a string; GET /v1/models lists the names", param="model")
    return Body(fields, values, model)


def _check(values: dict[str, Any], max_choices: int) -> None:
    for field in REFUSED & values.keys():
        raise RefusedField(f"{field!r} is a field of the server behind this proxy; leave it out", param=field)
    if values.get("prompt_logprobs") is not None:
        raise deadly("prompt_logprobs")
    _check_choices(values, max_choices)


def _check_choices(values: dict[str, Any], most: int) -> None:
    """`n`, or `best_of`, for each of the prompts: vLLM samples them all at once, whoever else is waiting."""
    prompts = values.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    for field in ("n", "best_of"):
        wanted = whole(values.get(field)) or 1
        if wanted * several > most:
            raise BadRequest(f"{wanted} choices for {several} prompts are over {most} (proxy.max_choices)", param=field)


def whole(value: Any) -> int | None:
    """A whole number as vLLM reads it, also from 2.0 and "2"; None where it is none."""
    if not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return int(number) if number.is_integer() else None


def deadly(field: str) -> RefusedField:
    """The error for a field that would end vLLM's engine for everybody: it computes the prompt's logprobs."""
    return RefusedField(f"{field!r} is not served here: it would stop the engine; leave it out", param=field)


def _may_be_deep(data: bytes) -> bool:
    """Whether there are brackets enough to be nested too deep."""
    # `count` looks at byte after byte; `replace` goes from one bracket to the next.
    most = MAX_DEPTH + 1
    without = len(data.replace(b"[", b"", most)) + len(data.replace(b"{", b"", most))
    return 2 * len(data) - without > MAX_DEPTH


def depth(value: Any) -> int:
    """How deep lists and objects are nested in one another."""
    levels, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        levels += 1
        level = [deeper for inner in level for deeper in (inner.values() if isinstance(inner, dict) else inner)]
    return levels


def _of_texts(values: dict[str, Any]) -> bool:
    """Whether it is a chat of texts alone, as most are: there is no place for media in it.

    The messages of a body that is not small tell so sooner than all its bytes.
    """
    messages = values.get("messages")
    if type(messages) is not list or not _BESIDE.isdisjoint(values):
        return False
    for message in messages:
        if type(message) is not dict:
            return False
        of_content = type(message.get("content"))
        # Most have a role beside it and nothing else, which takes half as long to see.
        if of_content is str and len(message) == 2 and "role" in message:
            continue
        if of_content is list or not _OF_TEXTS.issuperset(message):
            return False
    return True


def _media(values: dict[str, Any]) -> Iterator[str]:
    """The addresses of media in a conversation's content parts: OpenAI's `…_url`, Anthropic's `source`."""
    for field in ("messages", *_BESIDE_MESSAGES):
        items = values.get(field)
        for item in items if isinstance(items, list) else [items]:
            if isinstance(item, dict):
                yield from _of_parts([item, *_list(item.get("content")), *_list(item.get("output"))])


def _of_parts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            if name == "source" or name.endswith("_url"):
                url = value.get("url") if isinstance(value, dict) else value
                if isinstance(url, str):
                    yield url
        if part.get("type") == "tool_result":
            yield from _of_parts(_list(part.get("content")))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_media(url: str, domains: Container[str]) -> None:
    """Let the server fetch nothing on an app's word: it stands where the app does not."""
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
