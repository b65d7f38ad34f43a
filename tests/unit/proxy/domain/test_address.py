from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.domain.address import Address, split_url
from proxy.domain.address import address_of as read_address
from proxy.errors import BadId, BadRequest


def address_of(
    headers: Mapping[bytes, bytes] | None = None,
    url: Mapping[str, str] | None = None,
    metadata: Any = None,
    sessions: Sequence[bytes] = (),
) -> Address:
    return read_address(headers or {}, url or {}, metadata, sessions)


def test_a_call_that_says_nothing_is_a_training_call_of_nobody() -> None:
    assert address_of({}) == Address()


def test_every_header_is_read() -> None:
    headers = {
        b"x-trajectory-id": b"run.1:a@b-c_d",
        b"x-group-id": b"g",
        b"x-group-size": b"4",
        b"x-task": b"tic-tac-toe, first move",
        b"x-split": b" Eval ",
        b"x-no-train": b"TRUE",
        b"x-metadata": '{"name": "Jürgen", "n": [1, null]}'.encode(),
    }
    metadata = {"name": "Jürgen", "n": [1, None]}
    assert address_of(headers) == Address(
        trajectory_id="run.1:a@b-c_d",
        named_by="header",
        group_id="g",
        group_size=4,
        task="tic-tac-toe, first move",
        split="eval",
        no_train=True,
        metadata=metadata,
    )


def test_every_key_is_resolved_on_its_own_headers_then_url_then_metadata() -> None:
    address = address_of(
        {b"x-trajectory-id": b"t-header", b"x-session-id": b"session"},
        {"trajectory_id": "t-url", "group_id": "g-url"},
        {"trajectory_id": "t-body", "group_id": "g-body", "task": "from the body", "team": "red"},
        [b"x-session-id"],
    )
    assert (address.trajectory_id, address.named_by) == ("t-header", "header")
    assert (address.group_id, address.task, address.metadata) == ("g-url", "from the body", {"team": "red"})


@pytest.mark.parametrize(
    ("headers", "url", "metadata", "named"),
    [
        ({}, {"trajectory_id": "t"}, {"trajectory_id": "u"}, ("t", "url")),
        ({b"x-session-id": b"s"}, {}, {"trajectory_id": "u"}, ("u", "metadata")),
        ({b"x-session-id": b"s", b"session-id": b"first"}, {}, None, ("first", "agent")),
        ({b"x-session-id": b"no id of ours"}, {}, {}, (None, None)),
        ({}, {}, ["no", "object"], (None, None)),
    ],
)
def test_the_first_rule_that_names_the_trajectory_counts(
    headers: dict[bytes, bytes], url: dict[str, str], metadata: Any, named: tuple[str | None, str | None]
) -> None:
    address = address_of(headers, url, metadata, [b"session-id", b"x-session-id"])
    assert (address.trajectory_id, address.named_by) == named


def test_metadata_may_hold_numbers_and_truths_where_headers_hold_text() -> None:
    address = address_of(metadata={"no_train": True, "group_size": 3, "split": "eval"})
    assert (address.no_train, address.group_size, address.split, address.metadata) == (True, 3, "eval", None)


@pytest.mark.parametrize(
    "metadata", [{"trajectory_id": ["t"]}, {"group_id": "a b"}, {"group_size": 1}, {"no_train": "yes"}, {"task": ""}]
)
def test_what_metadata_says_wrongly_is_refused_by_its_name(metadata: dict[str, Any]) -> None:
    with pytest.raises((BadId, BadRequest), match="metadata"):
        address_of(metadata=metadata)


def test_a_url_says_keys_in_any_order() -> None:
    assert split_url("/r/group/g/trajectory/t/v1/chat/completions") == (
        {"group_id": "g", "trajectory_id": "t"},
        "/v1/chat/completions",
    )
    assert split_url("/r/v1/models") == ({}, "/v1/models")


@pytest.mark.parametrize(
    "path",
    ["/r/", "/r/trajectory/t", "/r/tracjectory/t/v1/x", "/r/trajectory//v1", "/r/task/a/task/b/v1/x", "/r/task/v1"],
)
def test_a_url_that_says_something_else_is_refused(path: str) -> None:
    with pytest.raises(BadRequest):
        split_url(path)


@pytest.mark.parametrize("header", ["x-trajectory-id", "x-group-id"])
@pytest.mark.parametrize("value", [b"", b"a b", b"a/b", b"\xe4", b"x" * 129, b"a\n"])
def test_an_id_out_of_the_alphabet_is_refused_by_name(header: str, value: bytes) -> None:
    with pytest.raises(BadId, match=header.title()) as caught:
        address_of({header.encode(): value})
    assert caught.value.status == 400
    assert caught.value.param == header.title()


@given(st.text("ABCabc019._:@-", min_size=1, max_size=128))
def test_every_id_of_the_alphabet_is_taken_as_it_is(text: str) -> None:
    assert address_of({b"x-trajectory-id": text.encode()}).trajectory_id == text


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (b"x-split", b"test"),
        (b"x-no-train", b"1"),
        (b"x-task", b""),
        (b"x-task", b"a\n"),
        (b"x-task", b"x" * 129),
        (b"x-group-size", b"1"),
        (b"x-group-size", b"1025"),
        (b"x-group-size", b"\xb2"),
        (b"x-group-size", b"9" * 5000),
        (b"x-group-size", b"000000002" + b"9" * 20),
        (b"x-metadata", b"[]"),
        (b"x-metadata", b"{"),
        (b"x-metadata", b'{"a": NaN}'),
        (b"x-metadata", b'{"a": "\xff"}'),
        (b"x-metadata", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ],
)
def test_another_value_than_a_header_may_have_is_refused(header: bytes, value: bytes) -> None:
    with pytest.raises(BadRequest):
        address_of({header: value})
