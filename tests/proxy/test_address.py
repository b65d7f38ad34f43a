import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.address import Address, address_of
from proxy.errors import BadId, BadRequest


def test_a_call_that_says_nothing_is_a_training_call_of_nobody() -> None:
    assert address_of({}) == Address()


def test_every_header_is_read() -> None:
    headers = {
        b"x-trajectory-id": b"run.1:a@b-c_d",
        b"x-group-id": b"g",
        b"x-task": b"tictactoe",
        b"x-split": b" Eval ",
        b"x-no-train": b"TRUE",
        b"x-metadata": '{"name": "Jürgen", "n": [1, null]}'.encode(),
    }
    metadata = {"name": "Jürgen", "n": [1, None]}
    assert address_of(headers) == Address("run.1:a@b-c_d", "g", "tictactoe", "eval", True, metadata)


@pytest.mark.parametrize("header", ["x-trajectory-id", "x-group-id", "x-task"])
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
