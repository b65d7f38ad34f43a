import pytest

from proxy.admission.middleware import check_origin
from proxy.errors import Forbidden

ORIGINS = ("https://app.example.com", "http://localhost:3000")


@pytest.mark.parametrize("host", [b"127.0.0.1", b"127.0.0.1:8000", b"localhost:1", b"LOCALHOST", b"[::1]:8000"])
def test_this_machine_may_ask(host: bytes) -> None:
    assert check_origin({b"host": host}) is None


@pytest.mark.parametrize(
    "host",
    [b"", b"example.com", b"127.0.0.1.example.com", b"localhost.example.com", b"10.0.0.1:8000", b"[::1", b"\xff"],
)
def test_a_name_that_was_bound_to_this_machine_may_not(host: bytes) -> None:
    with pytest.raises(Forbidden, match="keys create"):
        check_origin({b"host": host})


def test_a_request_without_host_may_not() -> None:
    with pytest.raises(Forbidden):
        check_origin({})


def test_a_page_of_this_machine_may_ask() -> None:
    assert check_origin({b"host": b"localhost:8000", b"origin": b"http://localhost:3000"}) is None


@pytest.mark.parametrize("origin", [b"https://example.com", b"null", b"", b"http://localhost.example.com", b"file://"])
def test_a_page_of_another_origin_may_not(origin: bytes) -> None:
    with pytest.raises(Forbidden):
        check_origin({b"host": b"localhost:8000", b"origin": origin})


def test_without_keys_not_even_a_page_of_the_settings_may() -> None:
    with pytest.raises(Forbidden):
        check_origin({b"host": b"localhost:8000", b"origin": ORIGINS[0].encode()}, cors_origins=ORIGINS)


def test_without_keys_a_page_of_this_machine_that_the_settings_name_reads_the_answers() -> None:
    headers = {b"host": b"localhost:8000", b"origin": ORIGINS[1].encode()}
    assert check_origin(headers, cors_origins=ORIGINS) == ORIGINS[1].encode()


@pytest.mark.parametrize("header", [b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"])
def test_a_forwarded_request_may_not(header: bytes) -> None:
    with pytest.raises(Forbidden, match=header.decode()):
        check_origin({b"host": b"localhost:8000", header: b"127.0.0.1"})


@pytest.mark.parametrize("host", [b"", b"example.com", b"10.0.0.1:8000", b"[::1", b"\xff"])
def test_where_keys_decide_host_and_forwarding_are_free(host: bytes) -> None:
    assert check_origin({b"host": host, b"x-forwarded-for": b"10.0.0.9"}, keys_needed=True) is None


@pytest.mark.parametrize("origin", ORIGINS)
def test_with_keys_a_page_of_the_settings_may_and_is_to_be_told(origin: str) -> None:
    headers = {b"host": b"proxy.example.com", b"origin": origin.encode()}
    assert check_origin(headers, keys_needed=True, cors_origins=ORIGINS) == origin.encode()


@pytest.mark.parametrize(
    "origin",
    [
        *(b"https://example.com", b"http://app.example.com", b"https://app.example.com:444", b"https://app.example.co"),
        *(b"https://evil.app.example.com", b"https://app.example.com.evil.net", b"null", b"", b"\xff", b"file://"),
        *(b"https://proxy.example.com.evil.net", b"https://proxy.example.com:1", b"proxy.example.com"),
    ],
)
def test_with_keys_no_other_page_may(origin: bytes) -> None:
    headers = {b"host": b"proxy.example.com", b"origin": origin}
    with pytest.raises(Forbidden, match=r"proxy\.cors_origins"):
        check_origin(headers, keys_needed=True, cors_origins=ORIGINS)


@pytest.mark.parametrize("origin", [b"https://proxy.example.com", b"http://Proxy.Example.com"])
def test_a_page_of_the_proxys_own_may_and_needs_not_be_told(origin: bytes) -> None:
    assert check_origin({b"host": b"proxy.example.com", b"origin": origin}, keys_needed=True) is None


def test_no_host_is_no_origin_of_ours() -> None:
    for origin in (b"http://", b"https://"):
        with pytest.raises(Forbidden):
            check_origin({b"host": b"", b"origin": origin}, keys_needed=True)
