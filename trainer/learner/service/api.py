"""Send requests to a server of the Tinker API, wait for their results, and fetch adapters.

The form of the API is that of the package `tinker` 0.16, whose requests are JSON, and of SkyRL 0.3's server
(`skyrl.tinker.api`). Work is requested first and its result fetched later, by the number of the request.
"""

import contextlib
import io
import math
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

from trainer.errors import ServiceDown
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.registry.adapters import CONFIG, WEIGHTS

HEARTBEAT_S = 10.0
"""SkyRL ends a session that has been silent for 300 s, with its models; Tinker's own client sends as often."""
LOOK_S = 20.0
"""Longest wait in one request for a result: the step's lease is renewed between two of them."""
PAUSE_S = 1.0
RESULT = "retrieve_future"
"""Where results are fetched."""
SERVER_ERROR, NOT_YET, TOO_EARLY = 500, 408, 425
LARGEST_ADAPTER = 4 << 30
"""Bytes of an archive. A rank-64 LoRA on all linear layers of a 70B model has less than 3 GiB in bf16."""
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
    data: list[float | None]
    """JSON has no NaN, so servers write null."""


class _Output(msgspec.Struct):
    logprobs: _Numbers


class _PassResult(msgspec.Struct):
    loss_fn_outputs: list[_Output]


class _UpdateResult(msgspec.Struct):
    metrics: dict[str, float | None] | None = None


class Service:
    """A session on a server. Other threads may not use it.

    Whatever goes wrong raises ServiceDown: a server that was started again, is out of memory or full answers much as
    one that refuses a request does, and a step that waits loses nothing.
    """

    def __init__(self, settings: TrainingServiceSettings, renew: Callable[[], None] = lambda: None) -> None:
        """`renew` is called while results are awaited; if it raises, the wait ends.

        Raises:
            ServiceDown: it does not answer, or our key is not in the environment.
        """
        headers = {}
        if settings.api_key_env is not None:
            if not (key := os.environ.get(settings.api_key_env, "").strip()):
                raise ServiceDown(f"training_service: the environment has no {settings.api_key_env}")
            headers = {"X-API-Key": key}
        self._renew = renew
        self._url, self._timeout_s = settings.url.rstrip("/"), settings.timeout_s
        self._http = httpx.Client(base_url=f"{self._url}/api/v1/", headers=headers, timeout=LOOK_S, trust_env=False)
        self._models = set[str]()
        silent = threading.Event()
        self.close = weakref.finalize(self, _end, self._http, self._models, silent)
        """End the session, and free its models. May be called twice; called too when this object is collected. A server
        ends a session by itself some minutes after its process has gone."""
        body = {"tags": ["whetstone"], "user_metadata": None, "sdk_version": "whetstone", "type": "create_session"}
        self._session = self._answer("create_session", body, _Session).session_id
        self._made = 0
        beat = threading.Thread(target=_beat, args=(self._http, self._session, silent), name="heartbeat", daemon=True)
        beat.start()

    def create(self, model: str, rank: int, seed: int, start: Checkpoint | None, *, optimizer: bool) -> str:
        """Return the id of a new model: a LoRA that changes nothing yet, or what was saved at `start`."""
        self._made += 1
        lora = {"rank": rank, "seed": seed, "train_unembed": False, "train_attn": True, "train_mlp": True}
        body = {"session_id": self._session, "model_seq_id": self._made, "base_model": model, "lora_config": lora}
        model_id: str = self._done("create_model", {**body, "type": "create_model"}, _Model).model_id
        self._models.add(model_id)
        if start is not None:
            try:
                self.load(model_id, start, optimizer=optimizer)
            except BaseException:
                self.unload(model_id)
                raise
        return model_id

    def load(self, model_id: str, start: Checkpoint, *, optimizer: bool) -> None:
        """Have the model continue from what was saved. SkyRL 0.3 always loads the optimizer's moments too."""
        body = {"model_id": model_id, "path": start.path, "optimizer": optimizer, "type": "load_weights"}
        self._done("load_weights", body, Any)

    def unload(self, model_id: str) -> None:
        """Free the model's memory on the server."""
        _unload(self._http, model_id)
        self._models.discard(model_id)

    def pass_through(
        self, model_id: str, data: Sequence[object], loss: str, config: Mapping[str, float] | None, *, backward: bool
    ) -> list[list[float]]:
        """Return the logprobs of each datum's targets, in nats; with `backward` its gradient is added up there.

        What the server could not compute is NaN.
        """
        kind = "forward_backward" if backward else "forward"
        body = {"data": data, "loss_fn": loss, "loss_fn_config": config}
        result = self._done(kind, {"model_id": model_id, f"{kind}_input": body}, _PassResult)
        if len(result.loss_fn_outputs) != len(data):
            raise self._down(kind, f"{len(result.loss_fn_outputs)} outputs for {len(data)} rows")
        outputs = (output.logprobs.data for output in result.loss_fn_outputs)
        return [[math.nan if logprob is None else logprob for logprob in logprobs] for logprobs in outputs]

    def update(self, model_id: str, adam: Mapping[str, float]) -> Mapping[str, float | None]:
        """Run the optimizer with what was added up. Return the server's figures of it."""
        result = self._done("optim_step", {"model_id": model_id, "adam_params": adam}, _UpdateResult)
        return result.metrics or {}

    def save(self, model_id: str) -> Checkpoint:
        """Save the model with its optimizer on the server."""
        body = {"model_id": model_id, "path": _name(), "type": "save_weights"}
        checkpoint: Checkpoint = self._done("save_weights", body, Checkpoint)
        return checkpoint

    def adapter(self, model_id: str) -> dict[str, bytes]:
        """Return the adapter's weights and configuration, as peft writes them: file name -> contents."""
        name = _name()
        body = {"model_id": model_id, "path": name, "ttl_seconds": SAMPLER_TTL_S, "type": "save_weights_for_sampler"}
        self._done("save_weights_for_sampler", body, Any)
        # Tinker names its checkpoints with their kind, SkyRL without.
        try:
            archive, path = self._archive(model_id, f"sampler_weights/{name}", waits_s=0.0)
        except ServiceDown:
            archive, path = self._archive(model_id, name, waits_s=self._timeout_s)
        return self._unpacked(archive, path)

    def _archive(self, model_id: str, checkpoint: str, *, waits_s: float) -> tuple[bytes, str]:
        """Return an archive and its path."""
        path = f"training_runs/{model_id}/checkpoints/{checkpoint}/archive"
        response = self._sent("GET", path, None, waits_s=waits_s)
        if response.next_request is not None:
            return self._downloaded(response.next_request, path), path
        return response.content, path

    def _downloaded(self, request: httpx.Request, path: str) -> bytes:
        """Return what a redirect leads to. Our key goes to no other server."""
        if request.url.copy_with(path="/", query=None) != self._http.base_url.copy_with(path="/", query=None):
            request.headers.pop("X-API-Key", None)
        content = bytearray()
        try:
            response = self._http.send(request, stream=True)
            with contextlib.closing(response):
                response.raise_for_status()
                for chunk in response.iter_bytes():
                    content += chunk
                    self._renew()
                    if len(content) > LARGEST_ADAPTER:
                        raise self._down(path, f"the archive has more than {LARGEST_ADAPTER} bytes")
        except httpx.HTTPError as error:
            raise self._down(path, f"cannot be fetched: {error}") from error
        return bytes(content)

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
            raise self._down(path, f"no archive of an adapter: {error}") from error
        if missing := {WEIGHTS, CONFIG} - files.keys():
            raise self._down(path, f"the archive has no {' and no '.join(sorted(missing))}")
        return files

    def _done(self, path: str, body: object, expected: Any) -> Any:
        """Request work, wait for it, and return its result."""
        request_id = self._answer(path, body, _Future).request_id
        until = time.monotonic() + self._timeout_s
        while (left_s := until - time.monotonic()) > 0:
            self._renew()
            response = self._sent("POST", RESULT, {"request_id": request_id}, waits_s=left_s, work=path)
            if response.status_code == NOT_YET:
                continue
            answer = self._decoded(path, response, Any)
            if isinstance(answer, dict) and answer.get("type") == "try_again":
                continue
            if isinstance(answer, dict) and answer.get("error"):
                raise self._down(path, str(answer["error"])[:300])
            return self._decoded(path, response, expected)
        raise self._down(path, f"not finished within training_service.timeout_s = {self._timeout_s:g} s")

    def _answer(self, path: str, body: object, expected: Any) -> Any:
        return self._decoded(path, self._sent("POST", path, body), expected)

    def _sent(
        self, method: str, path: str, body: object, *, waits_s: float = 0.0, work: str | None = None
    ) -> httpx.Response:
        """Return the answer, which is no error, or NOT_YET where a result was asked for. `work`: whose result.

        Where `waits_s` is given, an outage may last so many seconds. What adds to a gradient is sent once: an answer
        that was lost leaves open whether it was added.
        """
        content = None if body is None else msgspec.json.encode(body)
        headers = {"Accept": "application/gzip"} if body is None else {"Content-Type": "application/json"}
        until = time.monotonic() + waits_s
        while True:
            try:
                response = self._http.request(method, path, content=content, headers=headers)
                if not response.is_error or (path == RESULT and response.status_code == NOT_YET):
                    return response
                may_pass = response.status_code >= SERVER_ERROR or response.status_code == TOO_EARLY
                why = f"answers {response.status_code}: {response.text[:300]}"
            except httpx.ReadTimeout:
                if path == RESULT:
                    return httpx.Response(NOT_YET)
                may_pass, why = True, f"does not answer within {LOOK_S:g} s"
            except httpx.RequestError as error:
                may_pass, why = True, f"cannot be reached: {error}"
            if not may_pass or time.monotonic() >= until:
                raise self._down(work or path, why)
            self._renew()
            time.sleep(PAUSE_S)

    def _decoded(self, path: str, response: httpx.Response, expected: Any) -> Any:
        try:
            return msgspec.json.decode(response.content, type=expected)
        except msgspec.MsgspecError as error:
            raise self._down(path, f"answers, but not as the Tinker API does: {error}") from error

    def _down(self, path: str, why: str) -> ServiceDown:
        return ServiceDown(f"training_service: {self._url}/api/v1/{path}: {why}")


def _name() -> str:
    return f"whetstone-{secrets.token_hex(8)}"


def _beat(http: httpx.Client, session: str, silent: threading.Event) -> None:
    """Keep a session alive. A server that is away for a moment may find it again."""
    body = {"session_id": session, "type": "session_heartbeat"}
    while not silent.wait(HEARTBEAT_S):
        with contextlib.suppress(httpx.HTTPError, RuntimeError):  # the last one where the client is closed meanwhile
            http.post("session_heartbeat", json=body)


def _unload(http: httpx.Client, model_id: str) -> None:
    """Free a model. A server that does not answer now frees it some time after the session's last heartbeat."""
    with contextlib.suppress(httpx.HTTPError):
        http.post("unload_model", json={"model_id": model_id, "type": "unload_model"})


def _end(http: httpx.Client, models: Set[str], silent: threading.Event) -> None:
    silent.set()
    for model_id in models:
        _unload(http, model_id)
    http.close()
