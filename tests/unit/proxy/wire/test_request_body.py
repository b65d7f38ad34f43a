"""What a body is looked through for: the short ways to say that there is nothing come to the same as a look at all."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.domain.json_values import MAX_DEPTH, depth
from proxy.errors import NotJson, RefusedField
from proxy.wire.request_body import read_body

LONG = "A text that says little. " * 20
EVIL = "http://inside.example/"
TALK = {"role": "user", "content": LONG}
texts = st.sampled_from(["", "hi", LONG, "a url", "\\u", "é", '"image_url":', EVIL])
media = st.sampled_from([EVIL, {"url": EVIL}, {"url": "data:,x"}, "data:,x", None, 3])
parts = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.dictionaries(st.sampled_from(["type", "image_url", "source", "video_url", "text"]), media, max_size=2),
    st.fixed_dictionaries({"type": st.just("tool_result"), "content": st.just([{"image_url": EVIL}])}),
    st.sampled_from([None, 3, "a"]),
)
contents = st.one_of(texts, texts, st.none(), st.lists(parts, max_size=2), st.just({"url": EVIL}))
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", None]), "content": contents}),
    st.dictionaries(
        st.sampled_from(
            ["role", "content", "name", "tool_calls", "output", "source", "audio_url", "reasoning", "type"]
        ),
        st.one_of(contents, media),
        max_size=4,
    ),
    st.sampled_from([None, 3, "a"]),
)
conversations = st.one_of(st.lists(messages, max_size=4), messages)


def bodies() -> st.SearchStrategy[dict[str, Any]]:
    others = dict.fromkeys(("input", "documents", "query", "user", "metadata"), conversations)
    return st.fixed_dictionaries({"model": st.just("m"), "messages": conversations}, optional=others)


def addresses(value: Any) -> list[str]:
    """Of all media in a message, an item or a part, by the words of the guides: `…_url`, and `source`."""
    values = []
    for part in [value, *listed(value, "content"), *listed(value, "output")]:
        values += of_part(part)
    return values


def of_part(part: Any) -> list[str]:
    if not isinstance(part, dict):
        return []
    named = [value for name, value in part.items() if name == "source" or name.endswith("_url")]
    values = [value.get("url") if isinstance(value, dict) else value for value in named]
    inner = listed(part, "content") if part.get("type") == "tool_result" else []
    return [url for url in values if isinstance(url, str)] + [url for one in inner for url in of_part(one)]


def listed(value: Any, name: str) -> list[Any]:
    values = value.get(name) if isinstance(value, dict) else None
    return values if isinstance(values, list) else []


@settings(max_examples=400, deadline=None)
@given(bodies(), st.booleans(), st.booleans())
@example({"model": "m", "messages": [{"role": "user", "content": [{"image_url": EVIL}]}, LONG]}, False, False)
@example({"model": "m", "messages": [{"role": "user", "content": [{"image_url": EVIL}]}, TALK]}, False, False)
@example({"model": "m", "messages": [{"content": [{"text": LONG}, {"image_url": EVIL}], "role": "u"}]}, False, False)
@example({"model": "m", "messages": [{"content": LONG, "audio_url": EVIL}]}, False, False)
@example({"model": "m", "messages": [{"role": "user", "content": LONG, "audio_url": EVIL}]}, False, False)
@example({"model": "m", "messages": [{"role": "user", "content": LONG}], "input": [{"image_url": EVIL}]}, False, False)
@example({"model": "m", "messages": [{"role": "user", "content": LONG}, {"output": [{"a_url": EVIL}]}]}, False, True)
@example({"model": "m", "messages": {"content": [{"text": LONG}, {"image_url": EVIL}]}}, True, False)
def test_media_that_would_be_fetched_are_refused_however_long_the_texts_beside_them_are(
    body: dict[str, Any], escaped: bool, ascii_only: bool
) -> None:
    data = json.dumps(body, ensure_ascii=ascii_only, separators=(",", ":"))
    if escaped:
        data = data.replace("url", "\\u0075rl")
    looked_through = "url" in data or "\\u" in data
    urls = [
        url
        for name in ("messages", "input", "documents", "query")
        for item in (body[name] if isinstance(body.get(name), list) else [body.get(name)])
        for url in addresses(item)
    ]
    if looked_through and any(not url.startswith("data:") for url in urls):
        with pytest.raises(RefusedField, match="is not fetched"):
            read_body(data.encode())
    else:
        assert read_body(data.encode()).values == body


@pytest.mark.parametrize("text", ["", LONG, "[" * 300, "{" * 300, "[{" * 300])
@pytest.mark.parametrize("opening, closing", ["[]", ("[1, ", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
@pytest.mark.parametrize("over", [-1, 0, 1, 2])
def test_a_body_is_nested_as_deep_as_may_be_and_no_deeper(text: str, opening: str, closing: str, over: int) -> None:
    levels = MAX_DEPTH - 1 + over  # the body is one
    each = 1 + (opening == '[{"a":')
    inner = opening * (levels // each) + ("[" if levels % each else "")
    data = (
        f'{{"model":"m","x":{inner}1{"]" if levels % each else ""}{closing * (levels // each)},"y":"{text}"}}'.encode()
    )
    assert depth(json.loads(data)) == MAX_DEPTH + over
    if over > 0:
        with pytest.raises(NotJson, match="nested deeper than 200"):
            read_body(data)
    else:
        read_body(data)
