"""Feedback tokens: what is signed can be read back, and nothing else can."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admission.feedback_tokens import LONGEST, FeedbackClaim, FeedbackTokens, token_in
from proxy.errors import ExpiredToken, WrongToken
from whetstone.domain.api_keys import new_key

SECRET, OTHER = b"s" * 32, b"o" * 32
NOW_S = 1_000_000.25
TOKEN = FeedbackTokens([SECRET], 60, lambda: NOW_S).sign("acme", "k1", "c1").encode()


class Clock:
    def __init__(self) -> None:
        self.s = NOW_S

    def __call__(self) -> float:
        return self.s


def tokens(*secrets: bytes, clock: Any = lambda: NOW_S) -> FeedbackTokens:
    return FeedbackTokens(secrets or [SECRET], 60, clock)


@given(
    project=st.text(min_size=1, max_size=40),
    key_id=st.none() | st.text(max_size=12),
    completion_id=st.text("abz09._:@-", min_size=1, max_size=128),
    choice=st.integers(0, 2**31 - 1),
)
def test_what_is_signed_is_read_back(project: str, key_id: str | None, completion_id: str, choice: int) -> None:
    signed = tokens().sign(project, key_id, completion_id, choice, 1_000_060)
    claim = FeedbackClaim(1_000_060, project, key_id, completion_id, choice)
    assert tokens().verify(signed.encode()) == claim
    assert signed.isascii() and signed.removeprefix("wft_").replace("-", "").replace("_", "").isalnum()


@given(place=st.integers(4, len(TOKEN) - 1), character=st.integers(0, 255))
def test_a_token_that_was_changed_anywhere_is_refused(place: int, character: int) -> None:
    changed = TOKEN[:place] + bytes([character]) + TOKEN[place + 1 :]
    if changed != TOKEN:
        with pytest.raises(WrongToken):
            tokens().verify(changed)


@pytest.mark.parametrize("field", ["expires_at_s", "project", "key_id", "completion_id", "choice"])
def test_no_field_can_be_replaced(field: str) -> None:
    """The signature of one token under the claim of another."""
    mac = base64.urlsafe_b64decode(TOKEN[4:] + b"==")[:32]
    other: Any = {"expires_at_s": 2_000_000, "project": "other", "key_id": None, "completion_id": "c2", "choice": 1}
    claim = msgspec.structs.replace(tokens().verify(TOKEN), **{field: other[field]})
    forged = b"wft_" + base64.urlsafe_b64encode(mac + msgspec.msgpack.encode(claim)).rstrip(b"=")
    with pytest.raises(WrongToken):
        tokens().verify(forged)


@pytest.mark.parametrize(
    "sent",
    [
        *(b"", b"wft_", b"wft", TOKEN[4:], TOKEN + b"=", TOKEN + b"A", TOKEN[:-1], TOKEN.upper(), b"wft_" + TOKEN),
        *(b"wft_" + b"A" * LONGEST, b"wft_\xff", b"wft_" + b"A" * 44, b"wft_a b", b"Bearer " + TOKEN),
    ],
)
def test_what_is_no_token_is_refused(sent: bytes) -> None:
    with pytest.raises(WrongToken):
        tokens().verify(sent)


def test_an_api_key_in_its_place_is_named_as_the_mistake() -> None:
    with pytest.raises(WrongToken, match="An API key must never be in a web page") as caught:
        tokens().verify(new_key()[1].encode())
    assert (caught.value.status, caught.value.code) == (401, "invalid_feedback_token")


def test_a_token_is_valid_until_the_second_in_which_it_expires() -> None:
    clock = Clock()
    made = tokens(clock=clock)
    signed = made.sign("acme", "k1", "c1").encode()
    assert made.expiry() == 1_000_061 and made.expiry(1) == 1_000_002, "never shorter than the setting"
    for valid_s in (NOW_S, NOW_S - 3600, 1_000_060.999):
        clock.s = valid_s
        assert made.verify(signed).completion_id == "c1"
    for over_s in (1_000_061.0, 1_000_061.001, 2e9):
        clock.s = over_s
        with pytest.raises(ExpiredToken) as caught:
            made.verify(signed)
        assert caught.value.code == "feedback_token_expired"


def test_of_a_token_that_is_forged_and_expired_no_one_learns_the_expiry() -> None:
    forged = tokens(OTHER).sign("acme", "k1", "c1", expires_at_s=1)
    with pytest.raises(WrongToken) as caught:
        tokens().verify(forged.encode())
    assert not isinstance(caught.value, ExpiredToken)


def test_an_older_secret_verifies_and_the_newest_signs() -> None:
    old = tokens(OTHER).sign("acme", "k1", "c1").encode()
    rotated = tokens(SECRET, OTHER)
    assert rotated.verify(old).key_id == "k1"
    assert tokens(SECRET).verify(rotated.sign("acme", "k1", "c1").encode())
    with pytest.raises(WrongToken):
        tokens(SECRET).verify(old)


def test_a_claim_of_another_form_is_refused() -> None:
    """As of another release, with the same secret."""
    import hmac

    claim = msgspec.msgpack.encode([1, "acme"])
    signed = base64.urlsafe_b64encode(hmac.digest(SECRET, claim, "sha256") + claim).rstrip(b"=")
    with pytest.raises(WrongToken, match="another release"):
        tokens().verify(b"wft_" + signed)


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, None),
        ({b"authorization": b"Bearer wsk_x"}, None),
        ({b"authorization": b"Basic wft_x"}, None),
        ({b"authorization": b"bearer  wft_x "}, b"wft_x"),
        ({b"x-feedback-token": b" wft_y "}, b"wft_y"),
        ({b"x-feedback-token": b"wsk_x", b"authorization": b"Bearer wsk_z"}, b"wsk_x"),
        ({b"x-feedback-token": b"", b"authorization": b"Bearer wft_x"}, b""),
    ],
)
def test_a_token_comes_in_its_own_header_or_as_bearer(headers: dict[bytes, bytes], token: bytes | None) -> None:
    assert token_in(headers) == token
