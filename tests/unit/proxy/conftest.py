"""A proxy as it runs (uvicorn, real sockets), and a fake vLLM for the faults that the real one cannot be asked for."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec
import pytest
from sqlalchemy import Engine

from benchmarks.fakes.json_server import Handler
from benchmarks.fakes.json_server import Server as PlainServer
from migrations import schema
from proxy.app import Proxy
from proxy.domain.address import Address
from proxy.domain.call import Call, Choice
from proxy.http.client_response import Response
from proxy.server import Server
from tests.conftest import as_told
from whetstone.config.settings import Settings, as_environment
from whetstone.database.engine import connect
from whetstone.registry.projects import Store as CommandLineStore

PROMPT_IDS = [1, 2, 3]
ANSWER_IDS = [7, 8, 9]
LOGPROBS = [-0.5, -0.25, -0.125]
WORDS = ["Hel", "lo", ""]
STREAM: dict[str, Any] = {"model": "starter", "messages": [{"role": "user", "content": "hi"}], "stream": True}
"""What an app asks, to be answered by a stream."""
BASE_NAMES = ("starter@v0", "second@v0")
"""What a fake vLLM calls its base model."""


async def next_of(response: Response) -> bytes:
    """What comes next of a model server's answer; nothing at its end."""
    while (come := response.read_available()) is None:
        await response.wait_more()
    return come


def wait_for(found: Callable[[], Any], timeout_s: float = 60) -> Any:
    """Ask until it says something true; return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout_s} s"
        time.sleep(0.01)
    return value


def chunk(delta: dict[str, Any] | None, **values: Any) -> bytes:
    """One event of a stream, as vLLM writes it."""
    top = {key: values.pop(key) for key in ("prompt_token_ids", "usage", "error") if key in values}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | values
    choices = [] if delta is None else [choice]
    fields = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "starter@v0"}
    return b"data: " + json.dumps(fields | {"choices": choices} | top, separators=(",", ":")).encode() + b"\n\n"


def logprobs_of(*logprobs: float) -> dict[str, Any]:
    """The `logprobs` of a choice."""
    return {"content": [{"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []} for value in logprobs]}


def events() -> list[bytes]:
    """The events of a whole stream, with ids and logprobs."""
    spoken = [
        chunk(
            {"content": word},
            token_ids=[token],
            logprobs=logprobs_of(logprob),
            finish_reason="stop" if word == "" else None,
        )
        for word, token, logprob in zip(WORDS, ANSWER_IDS, LOGPROBS, strict=True)
    ]
    return [chunk({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT_IDS), *spoken, b"data: [DONE]\n\n"]


def answer(n: int = 1) -> dict[str, Any]:
    """A whole answer, with ids and logprobs."""
    choice = {
        "message": {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": []},
        "logprobs": logprobs_of(*LOGPROBS),
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ANSWER_IDS,
    }
    return {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1,
        "model": "starter@v0",
        "choices": [{"index": index} | choice for index in range(n)],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3 * n, "total_tokens": 3 + 3 * n},
        "prompt_logprobs": None,
        "prompt_token_ids": PROMPT_IDS,
    }


class FakeVllm(PlainServer):
    """Answers like vLLM by default; `script` is called with each request instead, once it is set.

    Its base model has every policy's name of version 0 that the tests use; adapters are loaded and unloaded.
    """

    def __init__(self, port: int = 0, base_names: Sequence[str] = BASE_NAMES) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = threading.Event()
        self.script: Callable[[FakeHandler, dict[str, Any]], None] = FakeHandler.speak
        self.well = True
        self.asleep = False
        self.generated = 0
        """What its counter of sampled tokens tells."""
        self.base_names = list(base_names)
        self.adapters: dict[str, str] = {}
        """Name and folder of what is loaded."""
        self.refuses: dict[str, str] = {}
        """Adapters that cannot be loaded, and why."""
        self.controls: list[tuple[str, str]] = []
        """What was loaded, unloaded and woken: path, and the adapter's name."""
        self.renderers: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {}
        """How it answers the routes that only make prompts, by path; without them it makes none of messages."""
        self._connections: set[socket.socket] = set()
        super().__init__(FakeHandler, port)

    def close(self) -> None:
        """Be gone, as after kill -9: connections end, whatever was on its way."""
        super().close()
        for connection in list(self._connections):
            with suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def control(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and answer of a control call, as vLLM 0.32 gives them."""
        name = body.get("lora_name", "")
        self.controls.append((path, name))
        if path == "/wake_up":
            self.asleep = False
        elif path == "/v1/load_lora_adapter":
            if name in self.refuses:
                return 500, _error(self.refuses[name], 500)
            if name in self.adapters:
                return 400, _error(f"The lora adapter '{name}' has already been loaded.", 400)
            self.adapters[name] = body["lora_path"]
        elif self.adapters.pop(name, None) is None:
            return 404, _error(f"The lora adapter '{name}' cannot be found.", 404)
        return 200, b"Success"


CONTROLS = ("/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "NotFoundError", "param": None, "code": code}}


class FakeHandler(Handler):
    server: FakeVllm

    def respond(self, body: dict[str, Any]) -> None:
        server = self.server
        if self.command == "GET":
            self.whole(*self.told())
        elif self.path in CONTROLS:
            self.whole(*server.control(self.path, body))
        elif self.path in server.renderers:
            self.whole(*server.renderers[self.path](body))
        elif self.path == "/tokenize" and "messages" in body:
            self.whole(404, {"detail": "Not Found"})
        else:
            server.requests.append(body)
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            if body.get("model") in (*server.base_names, *server.adapters):
                server.script(self, body)
            else:
                self.whole(404, _error(f"The model `{body.get('model')}` does not exist.", 404))

    def told(self) -> tuple[int, Any]:
        server = self.server
        if self.path == "/v1/models":
            base = [{"id": name, "object": "model", "max_model_len": 4096} for name in server.base_names]
            lora = [{"id": name, "object": "model", "max_model_len": None} for name in server.adapters]
            return 200, {"object": "list", "data": base + lora}
        if self.path == "/is_sleeping":
            return 200, {"is_sleeping": server.asleep}
        if self.path == "/metrics":
            return 200, f'vllm:generation_tokens_total{{engine="0"}} {server.generated}\n'.encode()
        return 200 if server.well else 503, b""

    def speak(self, body: dict[str, Any]) -> None:
        if body.get("stream"):
            self.begin()
            for event in events():
                self.say(event)
            self.end()
        else:
            self.whole(200, answer(body.get("n", 1)))

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def say(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def end(self) -> None:
        self.say(b"")

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def until_hung_up(self) -> None:
        """Say no more until the other side closes the connection."""
        self.connection.settimeout(60)
        assert self.connection.recv(1) == b""
        self.close_connection = True
        self.server.hung_up.set()


def identified(handler: FakeHandler, body: dict[str, Any]) -> None:
    """Answer under the id of the request, as vLLM does."""
    handler.whole(200, answer(body.get("n", 1)) | {"id": f"chatcmpl-{handler.headers['x-request-id']}"})


@pytest.fixture
def fake_vllm() -> Iterator[FakeVllm]:
    with FakeVllm() as fake:
        yield fake


class RunningProxy:
    """A proxy on a port of its own, in a thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: Engine = connect(settings.database_url)
        self.app = Proxy(settings)
        self._server = Server(self.app, settings.proxy)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        # verify=False: to read the certificates, which plain HTTP does not need, takes 50 ms a client.
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=False)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive())
        assert self._server.started, "the proxy did not start"

    def chat(self, headers: dict[str, str] | None = None, **values: Any) -> httpx.Response:
        body = {"model": "starter", "messages": [{"role": "user", "content": "hi"}]} | values
        return self.client.post("/v1/chat/completions", json=body, headers=headers)

    def rows(self, table: Any = schema.completions, **where: Any) -> list[Any]:
        query = as_told(table).order_by(table.c.created_at, table.c.id)
        for column, value in where.items():
            query = query.where(table.c[column] == value)
        # A reader: on SQLite an ordinary connection would wait for a writer.
        with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            return list(connection.execute(query))

    def recorded(self, count: int = 1, **where: Any) -> list[Any]:
        """The completions, once there are so many."""
        return wait_for(lambda: len(rows := self.rows(**where)) >= count and rows)

    @property
    def journal(self) -> Path:
        return self.settings.data / "journal"

    def stop(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the proxy does not stop"
        self.engine.dispose()


@pytest.fixture
def settings(database_url: str, fake_vllm: FakeVllm, tmp_path: Path) -> Settings:
    """For a proxy in front of the fake vLLM."""
    return settings_for(database_url, fake_vllm.url, tmp_path)


def settings_for(
    database_url: str, vllm_urls: str | Sequence[str], data: Path, *, vllm: Any = None, **values: Any
) -> Settings:
    """For a proxy of a test's own. A request that nobody can answer does not wait for long, unless the test says so."""
    values = {"proxy": {"max_wait_s": 0.2}} | values
    vllm = {"urls": vllm_urls} | (vllm or {})
    settings = Settings(data=data, database=database_url, broker="memory://", vllm=vllm, **values)
    engine = connect(database_url)
    CommandLineStore(engine).prepare(settings)
    engine.dispose()
    return settings


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Callable[[Settings], RunningProxy]:
    """Starts proxies, and stops them at the end."""

    def start(settings: Settings) -> RunningProxy:
        proxy = RunningProxy(settings)
        request.addfinalizer(proxy.stop)
        return proxy

    return start


@pytest.fixture
def proxy(settings: Settings, start: Callable[[Settings], RunningProxy]) -> RunningProxy:
    """A proxy in front of the fake vLLM."""
    return start(settings)


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """For what has nothing to do with the kind of database."""
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    return f"sqlite:///{tmp_path / 'whetstone.db'}"


@pytest.fixture
def plain_proxy(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> RunningProxy:
    """The same on SQLite only."""
    return start(settings_for(sqlite_url, fake_vllm.url, tmp_path))


@pytest.fixture
def real_proxy(
    vllm_url: str, sqlite_url: str, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> RunningProxy:
    """A proxy in front of the real vLLM."""
    return start(settings_for(sqlite_url, vllm_url, tmp_path))


@pytest.fixture(scope="module")
def real(vllm_url: str, sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """One proxy before the real vLLM for a whole file; one with other parsers where the file says so of `vllm_url`."""
    data = tmp_path_factory.mktemp("real")
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", vllm_url, data))
    yield proxy
    proxy.stop()


@pytest.fixture(scope="module")
def direct(vllm_url: str) -> Iterator[httpx.Client]:
    """Past the proxy."""
    with httpx.Client(base_url=vllm_url, timeout=120, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture(scope="session")
def door(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """One proxy for all tests of what is refused: they leave nothing behind, and nothing of theirs reaches vLLM."""
    data = tmp_path_factory.mktemp("door")
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    fake = FakeVllm()
    proxy = RunningProxy(settings_for(f"sqlite:///{data / 'whetstone.db'}", fake.url, data))
    yield proxy
    proxy.stop()
    fake.close()
    assert fake.requests == []


@contextmanager
def own_process(
    settings: Settings, *, log: int | IO[bytes] = subprocess.DEVNULL, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A proxy in a process of its own, which a test may kill: its address and the process. `log`: where it writes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy"],
        env={**os.environ, **as_environment(settings), "WHETSTONE_PROXY__PORT": str(port), **environment},
        stdout=subprocess.DEVNULL,
        stderr=log,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or _answers(url), timeout_s=120)
        yield url, process
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/healthz", trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def make_call(call_id: str = "c0", trajectory_id: str = "t0", **values: Any) -> Call:
    """A served call; by default one that can be trained on."""
    messages = values.pop("messages", [{"role": "user", "content": "hi"}])
    tools = values.pop("tools", None)
    choices = values.pop("choices", (make_choice(),))
    row: dict[str, Any] = {
        "id": call_id, "project": "default", "policy": "starter", "policy_version": 0, "endpoint": "chat.completions",
        "streamed": False, "status": "complete", "error": None, "trajectory_id": trajectory_id,
        "threaded_by": "header", "address": Address(trajectory_id=trajectory_id), "end_user": None,
        "messages": [raw(message) for message in messages], "tools_or_null": raw(tools),
        "sampling": raw({"temperature": 1.0}), "bent": None, "prompt_token_ids": PROMPT_IDS, "prompt_tokens": 3,
        "choices": choices, "created_at_s": 1_767_268_800.0, "ttft_ms": None, "total_ms": 1.5,
    }  # fmt: skip
    return Call(**(row | values))


def make_choice(index: int = 0, **values: Any) -> Choice:
    """A choice with ids and logprobs."""
    row = {"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    return Choice(**({"index": index, "token_ids": ANSWER_IDS, "logprobs": LOGPROBS} | row | values))


def raw(value: Any) -> msgspec.Raw:
    """A piece of JSON, as the app wrote it."""
    return msgspec.Raw(json.dumps(value).encode())
