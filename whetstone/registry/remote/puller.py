"""Pull adapters beside a vLLM server for programs on other machines: a small HTTP server, and its client.

`POST /adapters/<SHA-256 of the manifest>` answers with the folder of the verified adapter on this machine, else with
the error that the caller would have had itself. It asks for no key, as vLLM's own control calls do, and can do nothing
but pull what its own settings' store has.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec

from whetstone.errors import WhetstoneError
from whetstone.registry.adapters import AdapterDamaged, NotCopied, NotPublished, StoreUnreachable
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import is_sha256

ADAPTERS, HEALTH = "/adapters/", "/health"
STATUSES: dict[type[WhetstoneError], int] = {
    NotPublished: 404,
    AdapterDamaged: 422,
    StoreUnreachable: 503,
    NotCopied: 507,
}
"""Error -> status of the answer."""
CONNECT_S = 5.0
WAIT_S = 20.0
"""How long a caller waits for a pull. The puller goes on without it, and a later call gets the folder."""


class _PullAnswer(msgspec.Struct):
    folder: str


class _ErrorAnswer(msgspec.Struct):
    error: str


class PullerServer(ThreadingHTTPServer):
    """Answers at `host` and `port` (0: a free one)."""

    daemon_threads = True

    def __init__(self, cache: AdapterCache, host: str, port: int) -> None:
        self.cache = cache
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])


@contextmanager
def running(cache: AdapterCache, host: str = "127.0.0.1", port: int = 0) -> Iterator[PullerServer]:
    """Run a puller in a thread of this process."""
    with PullerServer(cache, host, port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class PullerClient:
    """Asks the puller beside one vLLM server."""

    def __init__(self, url: str, wait_s: float = WAIT_S) -> None:
        self._url = url
        self._wait_s = wait_s
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(wait_s, connect=CONNECT_S), trust_env=False)

    def fetch(self, sha256: str) -> Path:
        """Return the adapter's folder on the server's machine, once it is complete and verified there.

        Raises:
            NotPublished, AdapterDamaged, NotCopied: as the puller reports.
            StoreUnreachable: the puller cannot reach the store, is still pulling, or cannot be reached itself.
        """
        try:
            response = self._http.post(f"{ADAPTERS}{sha256}")
            if response.is_success:
                return Path(msgspec.json.decode(response.content, type=_PullAnswer).folder)
            why = msgspec.json.decode(response.content, type=_ErrorAnswer).error
        except httpx.ReadTimeout as error:
            raise StoreUnreachable(f"the puller at {self._url} is still pulling after {self._wait_s:g} s") from error
        except httpx.HTTPError as error:
            raise StoreUnreachable(
                f"the puller at {self._url} does not answer ({error!r}); is `whetstone puller` running beside vLLM?"
            ) from error
        except msgspec.MsgspecError as error:
            raise StoreUnreachable(f"{self._url} is no puller: it answers {response.status_code}") from error
        kinds = {status: kind for kind, status in STATUSES.items()}
        raise kinds.get(response.status_code, StoreUnreachable)(f"puller at {self._url}: {why}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PullerServer

    def do_GET(self) -> None:
        self._answer(*((200, {}) if self.path == HEALTH else (404, {"error": f"there is no {self.path}"})))

    def do_POST(self) -> None:
        sha256 = self.path.removeprefix(ADAPTERS)
        if not self.path.startswith(ADAPTERS) or not is_sha256(sha256):
            self._answer(400, {"error": f"POST {ADAPTERS}<SHA-256 of a manifest> is what a puller answers"})
            return
        try:
            self._answer(200, {"folder": str(self.server.cache.fetch(sha256))})
        except tuple(STATUSES) as error:
            self._answer(STATUSES[type(error)], {"error": str(error)})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing for each request; the cache logs what it pulls."""
