"""Empty pages name the address by which their reader reached the dashboard."""

import html
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.unit.proxy.conftest import RunningProxy
from tests.unit.proxy.dashboard.test_middleware import Person, make_key

EMPTY = ("/ui/policies", "/ui/policies/starter", "/ui/trajectories")
"""Pages that tell how to point a client here while nothing is recorded."""


@pytest.fixture
def person(plain_proxy: RunningProxy) -> Iterator[Person]:
    person = Person(plain_proxy)
    yield person
    person.client.close()


def named(page: str) -> str:
    """The client that a page shows, as it is read."""
    (client,) = re.findall(r"client = OpenAI\(.*?\)", page, re.DOTALL)
    return html.unescape(client)


@pytest.mark.parametrize("path", EMPTY)
def test_an_empty_page_names_the_readers_own_address(plain_proxy: RunningProxy, person: Person, path: str) -> None:
    port = urlsplit(plain_proxy.url).port
    assert named(person.get(path).text) == f'client = OpenAI(base_url="{plain_proxy.url}/v1", api_key="none")'
    for host in (f"localhost:{port}", "[::1]:9000"):
        shown = named(person.get(path, host=host).text)
        assert shown == f'client = OpenAI(base_url="http://{host}/v1", api_key="none")'


@pytest.mark.parametrize("path", EMPTY)
def test_over_tls_that_ends_in_front_of_the_proxy_it_names_https(
    plain_proxy: RunningProxy, person: Person, path: str
) -> None:
    key, host = make_key(plain_proxy, "admin"), "whetstone.example.com"
    headers = {"host": host, "x-api-key": key}
    shown = named(person.get(path, **headers, referer=f"https://{host}/ui/sign-in").text)
    assert shown == f'client = OpenAI(base_url="https://{host}/v1", api_key="…")'
    for elsewhere in ("https://whetstone.example.com.evil.example/", "http://whetstone.example.com/ui"):
        assert f'"http://{host}/v1"' in named(person.get(path, **headers, referer=elsewhere).text)


def test_no_forwarded_header_changes_the_address(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    forwarded = {
        "x-forwarded-proto": "https", "x-forwarded-host": "evil.example", "forwarded": "host=evil.example;proto=https",
    }  # fmt: skip
    for path in EMPTY:
        page = person.get(path, **forwarded, **{"x-api-key": key}).text
        assert f'base_url="{plain_proxy.url}/v1"' in named(page) and "evil.example" not in page


def test_a_host_with_markup_stays_words(plain_proxy: RunningProxy) -> None:
    key = make_key(plain_proxy, "admin")
    for path in EMPTY:
        page = raw_response(
            plain_proxy, f'GET {path} HTTP/1.1\r\nHost: a"><script>alert(1)</script>\r\nX-Api-Key: {key}\r\n'
        )
        assert page.startswith("HTTP/1.1 200 ")
        assert "<script>alert" not in page


def test_without_a_host_it_names_the_socket_that_was_reached(plain_proxy: RunningProxy) -> None:
    key = make_key(plain_proxy, "admin")
    page = raw_response(plain_proxy, f"GET /ui/policies HTTP/1.0\r\nX-Api-Key: {key}\r\n")
    assert f'base_url="{plain_proxy.url}/v1"' in named(page)


def test_a_foreign_host_without_keys_is_never_shown(person: Person) -> None:
    for path in EMPTY:
        answer = person.get(path, host="rebound.example")
        assert answer.status_code == 403 and "OpenAI(" not in answer.text


def raw_response(proxy: RunningProxy, head: str) -> str:
    """What comes back for a head that no client would write."""
    parts = urlsplit(proxy.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall((head + "Connection: close\r\n\r\n").encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_the_root_leads_to_the_dashboard(plain_proxy: RunningProxy, person: Person) -> None:
    for answer in (person.get("/"), httpx.get(f"{plain_proxy.url}/", trust_env=False)):
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui")
