"""The client of `fuzz`: send bytes, read answers, and check them."""

import json
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from benchmarks.fakes.instant_vllm import ON_PURPOSE

PATIENCE_S = 30.0
"""How long to wait for an expected answer."""
QUIET_S = 0.005
"""After this long without data, bytes that may be no request are assumed to get no answer."""


@dataclass
class Answer:
    """One answer of the proxy."""

    status: int = 0
    """0 until it is whole."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Answers:
    """Reads all answers on a connection."""

    def __init__(self) -> None:
        self.all: list[Answer] = []
        self._parser = httptools.HttpResponseParser(self)
        self.feed = self._parser.feed_data

    def on_message_begin(self) -> None:
        self.all.append(Answer())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.all[-1].headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.all[-1].body += body

    def on_message_complete(self) -> None:
        self.all[-1].status = self._parser.get_status_code()


def ask(url: str, data: bytes, *, patient: bool) -> list[Answer]:
    """Send bytes; return the answers. `patient`: an answer is expected, and the proxy then ends the connection.

    Raises:
        httptools.HttpParserError: the received data is no HTTP.
        TimeoutError: no answer, though one was expected.
        ConnectionError: the proxy closed the connection before an answer.
    """
    address, answers = urlsplit(url), _Answers()
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            if not patient:
                while select.select([connection], [], [], QUIET_S)[0] and (came := connection.recv(65536)):
                    answers.feed(came)
                connection.shutdown(socket.SHUT_WR)
            while came := connection.recv(65536):
                answers.feed(came)
        except OSError:
            if patient and not answers.all:
                raise
    return answers.all


def wrong_with(status: int, headers: Mapping[str, str], body: bytes, *, head: bool = False) -> str | None:
    """Return what is wrong with an answer; None where all is right."""
    if status < 200 or status > 599:
        return f"the status {status}"
    if status >= 500 and ON_PURPOSE.encode() not in body:
        return f"{status}: {body[:300]!r}"
    if status >= 400 and not head:
        return _wrong_error(headers, body)
    return None


def _wrong_error(headers: Mapping[str, str], body: bytes) -> str | None:
    try:
        error = json.loads(body)["error"]
        message, shape = error["message"], {"message", "type"} <= error.keys()
    except (ValueError, KeyError, TypeError):
        return f"an error that is none in OpenAI's shape: {body[:300]!r}"
    if not shape or not isinstance(message, str) or not message:
        return f"an error without message or type: {body[:300]!r}"
    if not headers.get("content-type", "").startswith("application/json"):
        return f"an error whose content type is not JSON: {dict(headers)}"
    return None
