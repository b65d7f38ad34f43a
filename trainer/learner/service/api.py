"""Send requests to a server of the Tinker API, wait for their results, and fetch adapters.

The form of the API is that of the package `tinker` 0.16, whose requests are JSON, and of SkyRL 0.3's server
(`skyrl.tinker.api`). Work is requested first and its result fetched later, by the number of the request.
"""

import contextlib
import io
import os
import secrets
import tarfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import httpx
import msgspec

from trainer.errors import ServiceDown, ServiceRefused
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import CONFIG, WEIGHTS

HEARTBEAT_S = 10.0
"""SkyRL ends a session that has been silent for 300 s, with its models; Tinker's own client sends as often."""
LOOK_S = 20.0
"""Longest wait in one request for a result: the step's lease is renewed between two of them."""
PAUSE_S = 1.0
SERVER_ERROR, NOT_YET, TOO_EARLY, NOT_FOUND = 500, 408, 425, 404
LARGEST_ADAPTER = 4 << 30
"""Bytes. A rank-64 LoRA on all linear layers of a 70B model has less than 3 GiB in bf16."""
SAMPLER_TTL_S = 3600
"""How long the server keeps the adapter's files, where it removes such: they are fetched at once."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What a server has saved of a model, by its address (`tinker://…`)."""

    path: str


class _Future(msgspec.Struct):
    request_id: str


class _Model(msgspec.Struct):
    model_id: str


class _Session(msgspec.Struct):
    session_id: str


class _Numbers(msgspec.Struct):
    data: list[float]


class _Output(msgspec.Struct):
    logprobs: _Numbers


class _PassResult(msgspec.Struct):
    loss_fn_outputs: list[_Output]


class _UpdateResult(msgspec.Struct):
    metrics: dict[str, float] | None = None


class Service:
    """A session on a server. Other threads may not use it."""

    def __init__(self, settings: TrainingServiceSettings, renew: Callable[[], None] = lambda: None) -> None:
        """`renew` is called while results are awaited; if it raises, the wait ends.

        Raises:
            ServiceRefused: its key is not in the environment.
            ServiceDown: it does not answer.
        """
        headers = {}
        if settings.api_key_env is not None:
            if not (key := os.environ.get(settings.api_key_env, "").strip()):
                raise ServiceRefused(f"training_service: the environment has no {settings.api_key_env}")
            headers = {"X-API-Key": key}
        self.renew = renew
        self._url, self._timeout_s = settings.url.rstrip("/"), settings.timeout_s
        self._http = httpx.Client(
            base_url=f"{self._url}/api/v1/", headers=headers, timeout=LOOK_S, trust_env=False, follow_redirects=True
        )
        body = {"tags": ["whetstone"], "user_metadata": None, "sdk_version": "whetstone", "type": "create_session"}
        self._session = self._answer("create_session", body, _Session).session_id
        self._made = 0
        self._models = set[str]()
        silent = threading.Event()
        heart = threading.Thread(target=_beat, args=(self._http, self._session, silent), name="heartbeat", daemon=True)
        heart.start()
        self.close = weakref.finalize(self, _end, self._http, self._models, silent, heart)
        """End the session, and free its models; safe to call twice, and called where nothing refers to this object."""

    def create(self, model: str, rank: int, seed: int) -> str:
        """Return the id of a new model: a LoRA that changes nothing yet, with an optimizer."""
        self._made += 1
        lora = {"rank": rank, "seed": seed, "train_unembed": False, "train_attn": True, "train_mlp": True}
        body = {"session_id": self._session, "model_seq_id": self._made, "base_model": model, "lora_config": lora}
        made: _Model = self._done("create_model", {**body, "type": "create_model"}, _Model)
        self._models.add(made.model_id)
        return made.model_id

    def load(self, model_id: str, saved: Checkpoint, *, optimizer: bool) -> None:
        """Have the model continue from what was saved."""
        body = {"model_id": model_id, "path": saved.path, "optimizer": optimizer, "type": "load_weights"}
        self._done("load_weights", body, Any)

    def unload(self, model_id: str) -> None:
        """Free the model's memory on the server."""
        _unload(self._http, model_id)
        self._models.discard(model_id)

    def pass_through(
        self, model_id: str, data: Sequence[object], loss: str, config: Mapping[str, float] | None, *, backward: bool
    ) -> list[list[float]]:
        """Return the logprobs of each datum's targets, in nats; with `backward` its gradient is added up there."""
        kind = "forward_backward" if backward else "forward"
        given = {"data": data, "loss_fn": loss, "loss_fn_config": config}
        passed = self._done(kind, {"model_id": model_id, f"{kind}_input": given}, _PassResult)
        if len(passed.loss_fn_outputs) != len(data):
            raise self._refused(kind, f"{len(passed.loss_fn_outputs)} outputs for {len(data)} rows")
        return [output.logprobs.data for output in passed.loss_fn_outputs]

    def update(self, model_id: str, adam: Mapping[str, float]) -> Mapping[str, float]:
        """Run the optimizer with what was added up. Return the server's figures of it."""
        stepped: _UpdateResult = self._done("optim_step", {"model_id": model_id, "adam_params": adam}, _UpdateResult)
        return stepped.metrics or {}

    def save(self, model_id: str) -> Checkpoint:
        """Save the model with its optimizer on the server."""
        body = {"model_id": model_id, "path": _name(), "type": "save_weights"}
        saved: Checkpoint = self._done("save_weights", body, Checkpoint)
        return saved

    def adapter(self, model_id: str) -> dict[str, bytes]:
        """Return the adapter's weights and configuration, as peft writes them: file name -> contents."""
        name = _name()
        body = {"model_id": model_id, "path": name, "ttl_seconds": SAMPLER_TTL_S, "type": "save_weights_for_sampler"}
        self._done("save_weights_for_sampler", body, Any)
        path = f"training_runs/{model_id}/checkpoints/{name}/archive"
        return self._unpacked(self._sent("GET", path, None, tries_s=self._timeout_s).content, path)

    def _unpacked(self, archive: bytes, path: str) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                for member in tar:
                    name = member.name.rpartition("/")[2]
                    if member.isfile() and name in (WEIGHTS, CONFIG) and member.size <= LARGEST_ADAPTER:
                        opened = tar.extractfile(member)
                        assert opened is not None  # it is a file
                        files[name] = opened.read()
        except (tarfile.TarError, EOFError, OSError) as error:
            raise self._refused(path, f"no archive of an adapter: {error}") from error
        if missing := {WEIGHTS, CONFIG} - files.keys():
            raise self._refused(path, f"the archive has no {' and no '.join(sorted(missing))}")
        return files

    def _done(self, path: str, body: object, expected: Any) -> Any:
        """Request work, and return its result."""
        return self._result(self._answer(path, body, _Future).request_id, expected)

    def _result(self, request_id: str, expected: Any) -> Any:
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            self.renew()
            response = self._sent("POST", "retrieve_future", {"request_id": request_id}, tries_s=self._timeout_s)
            if response.status_code == NOT_YET:
                continue
            answer = self._decoded("retrieve_future", response, Any)
            if isinstance(answer, dict) and answer.get("type") == "try_again":
                continue
            if isinstance(answer, dict) and answer.get("error"):
                raise self._refused("retrieve_future", str(answer["error"])[:300])
            return self._decoded("retrieve_future", response, expected)
        raise ServiceDown(
            f"training_service: {self._url} has not finished within training_service.timeout_s = {self._timeout_s:g} s"
        )

    def _answer(self, path: str, body: object, expected: Any) -> Any:
        return self._decoded(path, self._sent("POST", path, body), expected)

    def _sent(self, method: str, path: str, body: object, *, tries_s: float = 0.0) -> httpx.Response:
        """Return the answer, which is no error. Where `tries_s` is given, an outage may last so many seconds.

        What adds to a gradient is sent once: an answer that was lost leaves open whether it was added.
        """
        until = time.monotonic() + tries_s
        while True:
            try:
                content = None if body is None else msgspec.json.encode(body)
                headers = {} if body is None else {"Content-Type": "application/json"}
                response = self._http.request(method, path, content=content, headers=headers)
                why = f"answers {response.status_code}: {response.text[:300]}" if response.is_error else ""
            except httpx.ReadTimeout:
                if path == "retrieve_future":
                    return httpx.Response(NOT_YET)
                response, why = None, f"does not answer within {LOOK_S:g} s"
            except httpx.TransportError as error:
                response, why = None, f"cannot be reached: {error}"
            if response is not None and (not response.is_error or response.status_code == NOT_YET):
                return response
            if response is not None and not _may_pass(path, response.status_code):
                raise self._refused(path, why)
            if time.monotonic() >= until:
                raise ServiceDown(f"training_service: {self._url}/api/v1/{path} {why}")
            self.renew()
            time.sleep(PAUSE_S)

    def _decoded(self, path: str, response: httpx.Response, expected: Any) -> Any:
        try:
            return msgspec.json.decode(response.content, type=expected)
        except msgspec.MsgspecError as error:
            raise self._refused(path, f"answers, but not as the Tinker API does: {error}") from error

    def _refused(self, path: str, why: str) -> ServiceRefused:
        return ServiceRefused(f"training_service: {self._url}/api/v1/{path}: {why}")


def _may_pass(path: str, status: int) -> bool:
    """Return whether an error says nothing of the request itself: a model or session is gone where the server was
    started again. Only what was saved stays, so that is really missing where it is not found."""
    gone = status == NOT_FOUND and path != "load_weights"
    return gone or status >= SERVER_ERROR or status == TOO_EARLY


def _name() -> str:
    return f"whetstone-{secrets.token_hex(8)}"


def _beat(http: httpx.Client, session: str, silent: threading.Event) -> None:
    """Keep a session alive. A server that is away for a moment may find it again."""
    body = {"session_id": session, "type": "session_heartbeat"}
    while not silent.wait(HEARTBEAT_S):
        with contextlib.suppress(httpx.HTTPError):
            http.post("session_heartbeat", json=body)


def _unload(http: httpx.Client, model_id: str) -> None:
    """Free a model. A server that does not answer now frees it some time after the session's last heartbeat."""
    with contextlib.suppress(httpx.HTTPError):
        http.post("unload_model", json={"model_id": model_id, "type": "unload_model"})


def _end(http: httpx.Client, models: Set[str], silent: threading.Event, heart: threading.Thread) -> None:
    for model_id in models:
        _unload(http, model_id)
    silent.set()
    heart.join(LOOK_S)
    http.close()
