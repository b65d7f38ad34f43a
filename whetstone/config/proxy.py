"""Settings of serving: the proxy, vLLM and other model servers."""

import re
from typing import Annotated, Literal, Self

import regex
from pydantic import AfterValidator, Field, field_validator, model_validator

from whetstone.config.rewards import VARIABLE, Section, Url, without_login
from whetstone.config.trainer import BEST, DEMONSTRATIONS

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")
POLICY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SESSION_HEADERS = (
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "session-id",
    "session_id",
    "x-session-id",
    "x-litellm-session-id",
    "helicone-session-id",
)
"""Headers that agent programs, and gateways that support them, send with every call of a session."""


def policy_name(name: str) -> str:
    """Return the name if it is valid for a policy.

    Raises:
        ValueError: the name is malformed or reserved.
    """
    if not POLICY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no policy name: up to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    if name in (DEMONSTRATIONS, BEST):
        raise ValueError(f"no policy can be named {name!r}: `whetstone step --imitate {name}` means something else")
    return name


def _policy_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(policy_name(name) for name in names)


PolicyNames = Annotated[tuple[str, ...], AfterValidator(_policy_names)]


class ProxySettings(Section):
    """Settings of the proxy."""

    host: str = "127.0.0.1"
    """Address to listen on. On any address but loopback (`0.0.0.0`) it starts only if API keys exist, and TLS should be
    terminated in front of it: docs/keys.md."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 selects a free one (`<data>/up.json` records which)."""
    refresh_s: float = Field(0.1, gt=0, le=10)
    """How often the live versions are read from the database, in seconds."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body accepted; larger bodies get 413."""
    body_timeout_s: float = Field(30, gt=0)
    """How long a request's body may take to arrive, in seconds; after that 408."""
    max_url_bytes: int = Field(8192, ge=256)
    """Longest URL of a request; longer URLs get 414."""
    max_header_bytes: int = Field(64 * 2**10, ge=1024)
    """Most bytes of all headers of a request; above that 431."""
    max_headers: int = Field(200, ge=10)
    """Most headers of a request; above that 431."""
    headers_timeout_s: float = Field(20, gt=0)
    """How long a request's headers may take to arrive, in seconds, from the connection or from their first byte; after
    that 408."""
    keep_alive_s: float = Field(75, gt=0)
    """How long an idle connection stays open, in seconds."""
    max_connections: int = Field(2048, ge=1)
    """Most connections. A further one replaces the connection that has been idle longest, or gets 503."""
    max_in_flight: int = Field(1024, ge=1)
    """Most requests at once, those that wait (`max_waiting`) included, reads (GET) not counted; above that 503."""
    max_in_flight_bytes: int = Field(2**30, ge=2**20)
    """Most bytes of all request bodies at once; above that 503. Parsed bodies take several times as much memory."""
    write_timeout_s: float = Field(60, gt=0)
    """How long a client may read nothing of its answer, in seconds. Then its connection is closed and its call ends as
    aborted."""
    drain_timeout_s: float = Field(10, ge=0)
    """How long answers may continue after SIGTERM or SIGINT, in seconds; then they are cut off and end as aborted. A
    second signal cuts them off at once."""
    max_answer_bytes: int = Field(256 * 2**20, ge=2**20)
    """Longest answer accepted from a model server; a longer answer is cut off."""
    upstream_timeout_s: float = Field(600, gt=0)
    """Longest pause of vLLM within one answer, in seconds."""
    max_waiting: int = Field(1000, ge=0)
    """Most requests that wait while no server can answer them (it is restarting or sleeping); above that 503."""
    max_wait_s: float = Field(60, ge=0)
    """How long a request waits for a server, in seconds; then 503."""
    pin: Literal["trajectory", "live"] = "trajectory"
    """`trajectory`: a trajectory stays on the version it began with. `live`: each turn uses the live version."""
    pin_lifetime_s: float = Field(3600, gt=0)
    """How long a trajectory stays on its version, from its first turn, in seconds."""
    drain_s: float = Field(10, ge=0)
    """Seconds after which an adapter that is no longer served is unloaded, counted from the last moment at which a
    request may begin to use it."""
    max_choices: int = Field(256, ge=1)
    """Most choices that one request may ask for, over all its prompts; above that 400. More would delay other
    requests."""
    media_domains: tuple[str, ...] = ()
    """Hosts that vLLM may fetch media from when a request names a URL; if empty, only `data:` URLs are accepted."""
    normalise: tuple[str, ...] = ()
    """Regular expressions of text that makes equivalent prompts differ (dates, names, retrieved text). What they match
    is ignored when calls are matched to trajectories and first prompts are grouped. The served text is unchanged."""
    durability: Literal["journal", "fsync", "async"] = "journal"
    """Where a call must be stored before its last byte is sent, and feedback that the database cannot accept: `journal`
    in the kernel (kill -9 loses nothing, a power failure loses up to `fsync_every_s`), `fsync` on the disk, `async` in
    memory only."""
    fsync_every_s: float = Field(1.0, gt=0, le=60)
    """How often the journal is synced to the disk, in seconds."""
    max_journal_bytes: int = Field(4 * 2**30, ge=64 * 2**20)
    """Largest journal of one proxy while the database is unavailable; with `async` this is memory."""
    when_full: Literal["refuse", "unrecorded"] = "refuse"
    """What happens when the journal, or its disk, is full: `refuse` returns 503, `unrecorded` answers without recording
    and marks the answers so."""
    normalise_timeout_s: float = Field(0.05, gt=0, le=10)
    """How long the `normalise` patterns may search one conversation, in seconds; no other request is served
    meanwhile. Text not searched by then is compared unchanged, so the call may not be recognised and may begin a new
    trajectory."""
    kept_calls: int = Field(16_000, ge=1000)
    """Calls of each project that stay in memory to recognise their continuations, about 2 KB each; older calls are
    looked up in the database."""
    session_headers: tuple[str, ...] = SESSION_HEADERS
    """Headers of agent programs whose value is the trajectory id; the first header that is present counts."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the proxy, with an API key or a feedback token: `https://app.example.com`. All
    others get 403."""
    feedback_tokens: bool = False
    """Whether each answer carries the header `X-Feedback-Token`, by which a web page may post a thumb and a comment on
    this answer alone: docs/feedback.md. `POST /v1/feedback/tokens` makes such tokens with or without it."""
    feedback_token_lifetime_s: int = Field(24 * 3600, ge=60, le=30 * 24 * 3600)
    """How long a feedback token is valid, in seconds."""

    @field_validator("normalise")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                regex.compile(pattern)
            except regex.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return patterns

    @field_validator("session_headers")
    @classmethod
    def _lower_case(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [origin for origin in origins if not ORIGIN.fullmatch(origin)]:
            raise ValueError(f"{wrong[0]!r} is no origin as browsers send it: https://app.example.com, no path, no *")
        return origins

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the proxy."""
        return self.host in LOOPBACK


class UpstreamSettings(Section):
    """Another OpenAI-compatible server. Its answers are recorded as demonstrations and never trained on by GRPO."""

    url: Url
    """Base URL of the server, including `/v1`: `https://api.openai.com/v1`."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its API key; unset: no key is sent."""
    models: dict[str, str] = Field(min_length=1)
    """Policy name = model name on that server: `teacher = "gpt-4o"`. Apps use the policy name."""
    project: str | None = None
    """The project whose apps may use these models; unset: the home project."""
    usd_per_million_prompt_tokens: float | None = Field(None, ge=0)
    """Price of prompt tokens of all its models, for `spending.usd_per_day`; models with other prices get a section of
    their own with the same URL. Unless both prices are set, the cost is unknown."""
    usd_per_million_completion_tokens: float | None = Field(None, ge=0)
    """Price of answer tokens, in the same way. With prices, streams are sent with `stream_options.include_usage`."""

    @field_validator("models")
    @classmethod
    def _policy_names(cls, models: dict[str, str]) -> dict[str, str]:
        return {policy_name(name): model for name, model in models.items()}


class VllmSettings(Section):
    """How vLLM is started and reached."""

    urls: tuple[str, ...] = ()
    """URLs of vLLM servers that already run (`http://host:port`), all with the same model; empty: `up` starts vLLM."""
    replicas: int = Field(1, ge=1, le=64)
    """How many vLLM servers `up` starts."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the first vLLM that `up` starts, on loopback; the others use the next ports. 0 selects free ports."""
    shares_device: bool = False
    """vLLM and the training worker share one accelerator: vLLM sleeps while a step trains, and requests wait. This
    needs vLLM's sleep mode, which its CPU build does not have; on CPU both run at the same time. `up` switches it on by
    itself where both are on the same GPU, unless it is set to false: then both stay on the card, and each gets less."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of the vLLM servers that `up` starts, by their numbers in nvidia-smi, in equal parts: two for each server
    divide the model between two. Empty: one for each server."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """vLLM's --gpu-memory-utilization: its share of each GPU. Unset: `up` computes it where the trainer has the same
    GPU, else vLLM's own default, 0.92. `whetstone doctor --memory` prints it."""
    enforce_eager: bool | None = None
    """vLLM's --enforce-eager: no CUDA graphs, which make decoding on a GPU two to four times as fast and take about
    1 GiB. Unset: on the CPU build only."""
    dtype: str = "auto"
    """vLLM's --dtype. `auto` uses the dtype of the model's files, float32 included (the starter's)."""
    max_model_len: int | None = Field(None, ge=16)
    """vLLM's --max-model-len: longest prompt plus answer, in tokens; unset: the model's own limit."""
    block_size: int | None = Field(None, ge=1)
    """vLLM's --block-size in tokens. Unset: 32 on the CPU build, which hits the prefix cache where the default of 128
    does not; on GPUs vLLM's own default."""
    kv_cache_gb: int = Field(1, ge=1)
    """Memory for the KV cache of the CPU build, in GiB."""
    threads: int = Field(1, ge=1)
    """OpenMP threads of the CPU build. Tiny models are slower with more than one."""
    max_loras: int = Field(6, ge=3)
    """vLLM's --max-loras: adapters in one running batch. At least live + candidate + pinned + 1."""
    start_timeout_s: float = Field(300, gt=0)
    """How long vLLM may take until its health check succeeds, in seconds."""
    silence_s: float = Field(20, ge=5)
    """An engine that completes no step for this many seconds while a request waits for a token is killed and restarted.
    Must exceed the longest step: raise it for models from 0.5B on a CPU, where a long prompt can take that long."""
    tool_call_parser: str | None = None
    """vLLM's --tool-call-parser; unset: chosen by the model's family, which is recognised by its name."""
    reasoning_parser: str | None = None
    """vLLM's --reasoning-parser; unset: chosen by the model's family. A model of unknown family has none: its reasoning
    stays in its text."""
    extra_args: tuple[str, ...] = ()
    """Additional arguments for vLLM's server, passed unchanged."""

    @model_validator(mode="after")
    def _equal_parts(self) -> Self:
        if len(self.devices) % self.replicas or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices names {len(self.devices)} GPUs, not as many different ones for each server")
        return self

    @property
    def devices_each(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each server; empty ones where `devices` is unset."""
        each = len(self.devices) // self.replicas
        return tuple(self.devices[each * number : each * (number + 1)] for number in range(self.replicas))

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_several(cls, urls: object) -> object:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _without_logins(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(without_login(url) for url in urls)
