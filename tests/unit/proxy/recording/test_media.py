"""Images, audio and files are stored as hashes where a project wants no more of them; ids and threads stay."""

import base64
import hashlib
import json
from typing import Any

import msgspec
import pytest

from proxy.domain.call import Call
from proxy.recording.media import hashed
from proxy.recording.redaction import REDACTED, Redactor
from tests.unit.proxy.conftest import PROMPT_IDS, make_call
from whetstone.config.privacy import PrivacySettings

IMAGE = b"\x89PNG\r\n" + bytes(range(256))
ENCODED = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{ENCODED}"
SHA256 = f"sha256:{hashlib.sha256(IMAGE).hexdigest()}"


def part(kind: str, value: Any) -> dict[str, Any]:
    return {"type": kind, kind: value}


def of(*parts: Any) -> tuple[list[Any], int]:
    messages = [msgspec.Raw(json.dumps({"role": "user", "content": list(parts)}).encode())]
    after, count = hashed(messages)
    return msgspec.json.decode(after[0])["content"], count


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (part("image_url", {"url": URL, "detail": "low"}), part("image_url", {"url": SHA256, "detail": "low"})),
        (part("image_url", URL), part("image_url", SHA256)),
        (part("video_url", {"url": URL}), part("video_url", {"url": SHA256})),
        (part("audio_url", {"url": URL}), part("audio_url", {"url": SHA256})),
        (
            part("input_audio", {"data": ENCODED, "format": "wav"}),
            part("input_audio", {"data": SHA256, "format": "wav"}),
        ),
        (
            part("file", {"file_data": URL, "filename": "a.pdf"}),
            part("file", {"file_data": SHA256, "filename": "a.pdf"}),
        ),
        (part("image_url", {"url": f" {URL}\n"}), part("image_url", {"url": SHA256})),
        (part("image_embeds", ENCODED), part("image_embeds", SHA256)),
        ({"type": "input_file", "file_data": URL}, {"type": "input_file", "file_data": SHA256}),
        ({"type": "input_image", "image_url": URL}, {"type": "input_image", "image_url": SHA256}),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SHA256}},
        ),
        (
            {"type": "tool_result", "content": [{"source": {"media_type": "image/png", "data": ENCODED}}]},
            {"type": "tool_result", "content": [{"source": {"media_type": "image/png", "data": SHA256}}]},
        ),
    ],
)
def test_a_content_becomes_the_hash_of_its_bytes(before: Any, after: Any) -> None:
    text = {"type": "text", "text": "what is it?"}
    assert of(text, before, before) == ([text, after, after], 2)


@pytest.mark.parametrize(
    "given",
    [
        part("image_url", {"url": "https://example.com/a.png"}),
        part("image_url", {"url": SHA256}),
        part("file", {"file_id": "file-1"}),
        {"type": "text", "text": URL},
        part("image_url", None),
        {"type": "tool_use", "input": {"data": "x", "url": "u"}},
        "text",
    ],
)
def test_what_is_no_content_stays(given: Any) -> None:
    assert of(given) == ([given], 0)


def test_what_is_no_base64_is_hashed_as_it_is() -> None:
    for url in ("data:image/png;base64,!", "data:text/plain,hello"):
        (after,), count = of(part("image_url", {"url": url}))
        assert (after["image_url"]["url"], count) == (f"sha256:{hashlib.sha256(url.encode()).hexdigest()}", 1)


def test_messages_of_text_are_the_same_objects() -> None:
    messages = [msgspec.Raw(b'{"role":"user","content":"a file, image_url, data:"}'), msgspec.Raw(b'{"role":"user"}')]
    after, count = hashed(messages)
    assert count == 0 and all(one is other for one, other in zip(after, messages, strict=True))


def test_a_name_that_is_written_with_escapes_is_found() -> None:
    raw = json.dumps({"role": "user", "content": [part("image_url", {"url": URL})]}).replace(
        "image_url", "image\\u005furl"
    )
    after, count = hashed([msgspec.Raw(raw.encode())])
    assert count == 1 and ENCODED not in bytes(after[0]).decode()


def recorded(**values: Any) -> Call:
    call = make_call(messages=[{"role": "user", "content": [part("image_url", {"url": URL})]}])
    call = msgspec.structs.replace(call, stored={"id": "resp_1"})
    return Redactor(PrivacySettings(**values)).calls([call])[0]


def test_a_call_keeps_its_ids_and_cannot_be_continued_by_its_id() -> None:
    call = recorded(media="hash")
    assert SHA256 in bytes(call.messages[0]).decode()
    assert call.prompt_token_ids == PROMPT_IDS and call.redactions == 1
    assert call.stored == REDACTED


def test_with_redaction_both_are_counted() -> None:
    message = {
        "role": "user",
        "content": [part("image_url", {"url": URL}), {"type": "text", "text": "bob@example.com"}],
    }
    settings = PrivacySettings(media="hash", redact=("email",))
    assert Redactor(settings).calls([make_call(messages=[message])])[0].redactions == 2
    assert PrivacySettings(media="hash").redacts and not PrivacySettings().redacts
