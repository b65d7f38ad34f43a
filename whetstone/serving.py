"""Settings of what serves: the proxy, vLLM, other servers. Leaves of `whetstone.settings`."""

import re
from typing import Literal

import regex
from pydantic import Field, field_validator

from whetstone.training import BEST, DEMONSTRATIONS
from whetstone.worth import VARIABLE, Section, without_login

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
"""What agent programs and the gateways they know send with every call of a session."""


def policy_name(name: str) -> str:
    """The name, if a policy may have it.

    Raises:
        ValueError: none may.
    """
    if not POLICY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no policy name: up to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    if name in (DEMONSTRATIONS, BEST):
        raise ValueError(f"no policy can be named {name!r}: `whetstone step --imitate {name}` means something else")
    return name


class ProxySettings(Section):
    """What the proxy does."""

    host: str = "127.0.0.1"
    """Address to listen on. Off loopback (`0.0.0.0`) it starts only with API keys, and TLS belongs in front of it:
    docs/keys.md."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one (`<data>/up.json` says which)."""
    refresh_s: float = Field(0.1, gt=0, le=10)
    """How often the live versions are read from the database, in seconds."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body accepted; above it 413."""
    body_timeout_s: float = Field(30, gt=0)
    """How long a request's body may take to arrive, in seconds; above it 408."""
    max_url_bytes: int = Field(8192, ge=256)
    """Longest URL of a request; above it 414."""
    max_header_bytes: int = Field(64 * 2**10, ge=1024)
    """All headers of a request together; above it 431."""
    max_headers: int = Field(200, ge=10)
    """Most headers of a request; above it 431."""
    headers_timeout_s: float = Field(20, gt=0)
    """How long a request's headers may take to arrive, from the connection or their first byte on, in seconds; above
    it 408."""
    keep_alive_s: float = Field(75, gt=0)
    """How long a connection without a request stays open, in seconds."""
    max_connections: int = Field(2048, ge=1)
    """Most connections; one more takes the place of the one that is idle for longest, or gets 503."""
    max_in_flight: int = Field(1024, ge=1)
    """Most requests at once, reads (GET) not counted; above it 503. Those that wait (`max_waiting`) are among them."""
    max_in_flight_bytes: int = Field(2**30, ge=2**20)
    """Bodies of all requests at once; above it 503. What is read from them takes several times as much memory."""
    write_timeout_s: float = Field(60, gt=0)
    """A client that takes in nothing of its answer for so long is hung up on, in seconds; its call ends as aborted."""
    drain_timeout_s: float = Field(10, ge=0)
    """How long answers may go on after SIGTERM or SIGINT, in seconds; then they are broken off and end as aborted. A
    second signal breaks them off at once."""
    max_answer_bytes: int = Field(256 * 2**20, ge=2**20)
    """Longest answer taken from a model server; above it the answer breaks off."""
    upstream_timeout_s: float = Field(600, gt=0)
    """Longest silence of vLLM within one answer, in seconds."""
    max_waiting: int = Field(1000, ge=0)
    """Most requests that wait while no server can answer them (it starts again, or sleeps); above it 503."""
    max_wait_s: float = Field(60, ge=0)
    """How long a request waits for that, in seconds; then 503."""
    pin: Literal["trajectory", "live"] = "trajectory"
    """A trajectory stays on the version it began with, or follows the live one from turn to turn."""
    pin_lifetime_s: float = Field(3600, gt=0)
    """How long it stays, from its first turn on, in seconds."""
    drain_s: float = Field(10, ge=0)
    """How long after its last use may begin an adapter that is no longer served is unloaded, in seconds."""
    max_choices: int = Field(256, ge=1)
    """Most choices one request may ask for, all its prompts together; above it 400. More would make all others wait."""
    media_domains: tuple[str, ...] = ()
    """Hosts that vLLM may fetch media from on an app's word; without one only `data:` URLs pass."""
    normalise: tuple[str, ...] = ()
    """Regular expressions of what makes alike prompts differ (dates, names, retrieved text): what they match counts
    as nothing when conversations are continued and first prompts grouped. What is served stays as it is."""
    durability: Literal["journal", "fsync", "async"] = "journal"
    """What must have a call before its last byte goes out, and feedback that the database cannot take: `journal` the
    kernel (kill -9 loses nothing, a loss of power what `fsync_every_s` says), `fsync` the disk, `async` nobody."""
    fsync_every_s: float = Field(1.0, gt=0, le=60)
    """How often the journal is brought to the disk, in seconds."""
    max_journal_bytes: int = Field(4 * 2**30, ge=64 * 2**20)
    """Most that one proxy's journal may hold while the database is away; with `async` that is memory."""
    when_full: Literal["refuse", "unrecorded"] = "refuse"
    """What happens when the journal, or its disk, is full: 503, or answers that nobody records, and that say so."""
    normalise_timeout_s: float = Field(0.05, gt=0, le=10)
    """How long they may search one conversation, in seconds, while which nobody else is served; what is not done by
    then counts as it stands, so that the call may not be recognised and begins a new trajectory."""
    kept_calls: int = Field(16_000, ge=1000)
    """Calls of each project that stay in memory to recognise what goes on with them, some 1.5 KB each; what is older is
    looked up in the database."""
    session_headers: tuple[str, ...] = SESSION_HEADERS
    """Headers of agent programs whose value names the trajectory, the first that is there."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask, with a key of their own: `https://app.example.com`. All others are 403."""

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
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin as browsers send it: https://app.example.com, no path, no *")
        return origins

    @property
    def on_loopback(self) -> bool:
        """Only this machine can reach the proxy."""
        return self.host in LOOPBACK


class UpstreamSettings(Section):
    """Another OpenAI-compatible server: its answers are recorded as demonstrations, never trained on by GRPO."""

    url: str = Field(pattern=r"^https?://[^/\s]+")
    """Its base URL as clients write it, `/v1` included: `https://api.openai.com/v1`."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its key; without it none is sent."""
    models: dict[str, str] = Field(min_length=1)
    """Policy name = model name there: `teacher = "gpt-4o"`. Apps ask for the first."""
    project: str | None = None
    """The project whose apps may ask for them; without it the home project."""

    @field_validator("url")
    @classmethod
    def _without_login(cls, url: str) -> str:
        return without_login(url)

    @field_validator("models")
    @classmethod
    def _policy_names(cls, models: dict[str, str]) -> dict[str, str]:
        return {policy_name(name): model for name, model in models.items()}


class VllmSettings(Section):
    """How vLLM is started and reached."""

    urls: tuple[str, ...] = ()
    """Addresses of vLLM servers that run already (`http://host:port`), all with the same model; without any `up`
    starts them."""
    replicas: int = Field(1, ge=1, le=64)
    """How many servers `up` starts."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the first vLLM that `up` starts, on loopback, the others' follow; 0 takes free ones."""
    shares_device: bool = False
    """vLLM and the training worker share one accelerator: vLLM sleeps while a step trains, and requests wait. Needs
    vLLM's sleep mode, which its CPU build does not have; there both run side by side."""
    dtype: str = "auto"
    """vLLM's --dtype. `auto` follows the model's own files, float32 included (the starter's)."""
    max_model_len: int | None = Field(None, ge=16)
    """vLLM's --max-model-len: longest prompt and answer together, in tokens; without it the model's own."""
    block_size: int = Field(32, ge=1)
    """vLLM's --block-size in tokens. On the CPU build 32 hits the prefix cache where the default 128 does not."""
    kv_cache_gb: int = Field(1, ge=1)
    """Memory for the KV cache of the CPU build, in GiB."""
    threads: int = Field(1, ge=1)
    """OpenMP threads of the CPU build. Tiny models lose time with more than one."""
    max_loras: int = Field(6, ge=3)
    """vLLM's --max-loras: adapters of one running batch. At least live + candidate + pinned + 1."""
    start_timeout_s: float = Field(300, gt=0)
    """How long vLLM may take until it answers its health check."""
    silence_s: float = Field(20, ge=5)
    """An engine that takes no step for so long, though asked for a token, is killed and started again. Above the
    longest step: for models from 0.5B on a CPU, whose step over a long prompt takes that long, raise it."""
    tool_call_parser: str | None = None
    """vLLM's --tool-call-parser; without it that of the model's family, by its name."""
    reasoning_parser: str | None = None
    """vLLM's --reasoning-parser; likewise. A model of no family has none: its thinking stays in its text."""
    extra_args: tuple[str, ...] = ()
    """More arguments for vLLM's server, as they are."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_several(cls, urls: object) -> object:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _without_logins(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(without_login(url) for url in urls)
