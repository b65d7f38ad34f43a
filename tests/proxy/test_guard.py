import pytest

from proxy.errors import Forbidden
from proxy.guard import check


@pytest.mark.parametrize("host", [b"127.0.0.1", b"127.0.0.1:8000", b"localhost:1", b"LOCALHOST", b"[::1]:8000"])
def test_this_machine_may_ask(host: bytes) -> None:
    check({b"host": host})


@pytest.mark.parametrize(
    "host",
    [b"", b"example.com", b"127.0.0.1.example.com", b"localhost.example.com", b"10.0.0.1:8000", b"[::1", b"\xff"],
)
def test_a_name_that_was_bound_to_this_machine_may_not(host: bytes) -> None:
    with pytest.raises(Forbidden):
        check({b"host": host})


def test_a_request_without_host_may_not() -> None:
    with pytest.raises(Forbidden):
        check({})


def test_a_page_of_this_machine_may_ask() -> None:
    check({b"host": b"localhost:8000", b"origin": b"http://localhost:3000"})


@pytest.mark.parametrize("origin", [b"https://example.com", b"null", b"", b"http://localhost.example.com", b"file://"])
def test_a_page_of_another_origin_may_not(origin: bytes) -> None:
    with pytest.raises(Forbidden):
        check({b"host": b"localhost:8000", b"origin": origin})


@pytest.mark.parametrize("header", [b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"])
def test_a_forwarded_request_may_not(header: bytes) -> None:
    with pytest.raises(Forbidden, match=header.decode()):
        check({b"host": b"localhost:8000", header: b"127.0.0.1"})
