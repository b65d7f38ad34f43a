"""Define and load every setting, typed, bounded and documented, from whetstone.toml and `WHETSTONE_…` variables.

An unknown key, in the file or in the environment, stops the start with the nearest valid name. Nested settings are
written `[trainer] learning_rate = …` in the file and `WHETSTONE_TRAINER__LEARNING_RATE=…` in the environment; the
environment takes precedence.
"""

import contextlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PrivateAttr, ValidationError, model_validator

from whetstone.config.adapters import FILES, AdapterSettings
from whetstone.config.gate import GateSettings
from whetstone.config.launcher import LauncherSettings
from whetstone.config.privacy import PrivacySettings
from whetstone.config.proxy import PolicyNames, ProxySettings, UpstreamSettings, VllmSettings, policy_name
from whetstone.config.rewards import JudgeSettings, RewardSettings, Section, Url
from whetstone.config.secret_files import SUFFIX, take_up
from whetstone.config.spending import Prices, SpendingSettings, known_prices
from whetstone.config.teachers import TeacherSettings
from whetstone.config.trainer import TrainerSettings
from whetstone.config.training_service import TrainingServiceSettings
from whetstone.domain.ids import ID
from whetstone.domain.suggestions import suggestion
from whetstone.errors import SettingsError as SettingsError

PREFIX = "WHETSTONE_"
CONFIG_VARIABLE = "WHETSTONE_CONFIG"
BOOTSTRAP_VARIABLE = "WHETSTONE_BOOTSTRAP_ADMIN_KEY"
"""Holds the first admin key. It is not a setting, so it appears in no file and no dump."""
API_KEY_VARIABLE = "WHETSTONE_API_KEY"
"""Holds the key that the command line sends to a proxy that requires one. It is not a setting, for the same reason."""
FEEDBACK_SECRETS_VARIABLE = "WHETSTONE_FEEDBACK_SECRETS"
"""Holds the secrets that sign feedback tokens, the newest first. It is not a setting, for the same reason."""
LANGFUSE_VARIABLES = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
"""Hold the keys of `log.langfuse_url`, under Langfuse's own names."""
HUB_TOKEN_VARIABLE = "HF_TOKEN"
"""Holds the key of the model hub for gated models, under the hub's own name; vLLM and the trainer read it."""
NEVER_SHOWN = frozenset({"api_key_env", "broker", "database", "url", "urls"})
"""Settings that contain a password, or may by mistake."""
NO_SETTINGS = frozenset({CONFIG_VARIABLE, BOOTSTRAP_VARIABLE, API_KEY_VARIABLE, FEEDBACK_SECRETS_VARIABLE})
STARTER = Path(__file__).resolve().parent.parent / "starter"


class LogSettings(Section):
    """What the programs log, and where traces are sent."""

    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for machines: one object per line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines below this level are not written. `info` has a line for each call, `warning` none."""
    otlp_endpoint: Url | None = None
    """Base URL of an OpenTelemetry collector that accepts OTLP over HTTP (`http://127.0.0.1:4318`): traces go to its
    `/v1/traces`. If neither this nor OTEL_EXPORTER_OTLP_ENDPOINT in the environment is set, no traces are sent
    there."""
    langfuse_url: Url | None = None
    """URL of a Langfuse server (`https://cloud.langfuse.com`, or your own) that also receives traces. Its keys come
    from the environment, LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY."""


class SqlSettings(Section):
    """Limits of SQL queries."""

    timeout_s: float = Field(60, gt=0)
    """How long the database may work on a query of `whetstone sql`, in seconds, and on a query of a role that
    `whetstone sql-role` creates; `--timeout` raises it for a single query."""


class GroupSettings(Section):
    """When trajectories end and groups close."""

    target_size: int = Field(8, ge=2)
    """A group closes when it has this many members and all of them have ended."""
    minimum_size: int = Field(2, ge=2)
    """Fewest rewarded members that are compared with one another; smaller groups use the policy's baseline."""
    prompt_window_s: float = Field(600, ge=0)
    """Trajectories with the same first prompt that begin within this many seconds form a group; 0: no such groups."""
    deadline_s: float = Field(24 * 3600, gt=0)
    """An open group closes this many seconds after its first member began; a closed group waits as long for rewards."""
    idle_s: float = Field(30 * 60, gt=0)
    """A trajectory ends this many seconds after its last completion."""
    feedback_waits_s: float = Field(15 * 60, gt=0)
    """How long feedback waits for an unknown target, in seconds."""


class ProjectSettings(Section):
    """A tenant: its keys reach its own data only."""

    policies: PolicyNames = ()
    """Policies on the base model, each with its own series of adapters. The home project has these in addition to
    `policy` and `policies`; every other project needs at least one. Policy names are unique across projects."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other model names that its apps may use, and the policy that each stands for."""
    privacy: PrivacySettings = PrivacySettings()
    """Privacy settings: `[projects.<name>.privacy]`, for the home project too."""


class Settings(Section):
    """All settings of a stack."""

    data: Path = Path("data")
    """Folder of all stored data: database, journal, adapters, logs."""
    model: str = str(STARTER)
    """Base model: a folder or a hub name. The default is the starter model, which is part of the package."""
    policy: Annotated[str, AfterValidator(policy_name)] = "starter"
    """Policy name, which apps send as `model`."""
    policies: PolicyNames = ()
    """More policies on the same base model, each with its own series of adapters."""
    aliases: dict[str, str] = Field(default_factory=dict)
    """Other model names that apps may send, and the policy that answers: `"gpt-4o" = "support"`. GPT-4o is not
    called."""
    upstreams: dict[str, UpstreamSettings] = Field(default_factory=dict)
    """Other model servers, by a name of your choice: `[upstreams.openai]` with `url`, `api_key_env`, `models`."""
    teachers: dict[str, TeacherSettings] = Field(default_factory=dict)
    """Models whose probabilities a policy learns from, by a name of your choice: `[teachers.large]` with `url`,
    `model`."""
    project: str = Field("default", min_length=1)
    """The home project: the tenant of requests without a key, and of `policy` and `policies`."""
    projects: dict[str, ProjectSettings] = Field(default_factory=dict)
    """More tenants, by name, each with its own policies: `[projects.acme]`. Each key belongs to one tenant."""
    database: str | None = None
    """Database URL; unset: SQLite in the data folder. PostgreSQL: `postgresql+psycopg://…`."""
    broker: str | None = None
    """Celery's broker URL; unset: `up` starts its own Redis from a wheel."""
    seed: int = Field(0, ge=0)
    """Seed of the adapter's initial weights and of vLLM."""
    sweep_s: float = Field(1.0, gt=0)
    """How often each worker checks the database for due work, with or without a message, in seconds."""
    proxy: ProxySettings = ProxySettings()
    vllm: VllmSettings = VllmSettings()
    groups: GroupSettings = GroupSettings()
    log: LogSettings = LogSettings()
    sql: SqlSettings = SqlSettings()
    trainer: TrainerSettings = TrainerSettings()
    training_service: TrainingServiceSettings | None = None
    """A server that computes the steps instead of this machine: `[training_service]` with `url`. Unset: none."""
    launcher: LauncherSettings = LauncherSettings()
    adapters: AdapterSettings = AdapterSettings()
    gate: GateSettings = GateSettings()
    learning: dict[str, RewardSettings] = Field(default_factory=dict)
    """Reward settings of each policy: `[learning.starter]`, one section for each policy that needs one."""
    spending: SpendingSettings = SpendingSettings()
    judges: dict[str, JudgeSettings] = Field(default_factory=dict)
    """Models that rank groups, by a name of your choice: `[judges.strong] model = "openai/gpt-4.1-2025-04-14"`."""

    _whole: "Settings | None" = PrivateAttr(None)
    """For the settings of one project: the settings that they were derived from."""

    @model_validator(mode="after")
    def _one_meaning_per_name(self) -> Self:
        for name, project in self.projects.items():
            if not ID.fullmatch(name):
                raise ValueError(f"{name!r} is no project name: 1 to 128 of A-Z a-z 0-9 . _ : @ -")
            if not project.policies and name != self.project:
                raise ValueError(f'projects.{name}: name its policies: policies = ["{name.lower()}-agent"]')
        for name, upstream in self.upstreams.items():
            if upstream.project is not None and upstream.project not in (self.project, *self.projects):
                raise ValueError(
                    f"upstreams.{name}: there is no project {upstream.project!r}; there are: "
                    f"{', '.join((self.project, *self.projects))}"
                )
        names = [*self.all_trained, *self.answered_elsewhere]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two policies are named {twice[0]!r}")
        for one in self.of_projects():
            one._check_aliases(names)
            one._check_handovers()
        if unknown := sorted(self.learning.keys() - set(self.all_trained)):
            raise ValueError(f"learning.{unknown[0]}: no such policy; there are: {', '.join(self.all_trained)}")
        for policy, learning in self.learning.items():
            if strangers := sorted(set(learning.ruler.named) - self.judges.keys()):
                raise ValueError(
                    f"learning.{policy}.ruler: no judge is named {strangers[0]!r}; there are: "
                    f"{', '.join(self.judges) or 'none'}"
                )
        self._check_prices()
        return self

    def _check_prices(self) -> None:
        """Check that with a spending cap the price of every model of another server is known."""
        if self.spending.usd_per_day is None:
            return
        prices = self.upstream_prices
        for name, upstream in self.upstreams.items():
            if unpriced := [one for one in upstream.models if (upstream.project or self.home, one) not in prices]:
                raise ValueError(
                    f"upstreams.{name}: spending.usd_per_day is set, and the price of {unpriced[0]!r} is unknown; set "
                    "usd_per_million_prompt_tokens and usd_per_million_completion_tokens (0 if it costs nothing)"
                )

    def _check_handovers(self) -> None:
        """Check that each teacher of a handover is a model of another server, for the same project, and for one
        policy."""
        teachers: list[str] = []
        for policy, learning in self.learning.items():
            if learning.handover is None:
                continue
            teacher = learning.handover.teacher
            if teacher not in self.answered_elsewhere:
                raise ValueError(
                    f"learning.{policy}.handover: {teacher!r} is no model of another server of this project "
                    f"([upstreams.<name>] models); there are: {', '.join(self.answered_elsewhere) or 'none'}"
                )
            if teacher in teachers:
                raise ValueError(
                    f"learning.{policy}.handover: {teacher!r} is another policy's teacher too, and their rewards would "
                    "mix; give the model a second name in [upstreams.<name>] models"
                )
            teachers.append(teacher)

    def _check_aliases(self, taken: Sequence[str]) -> None:
        """Check that no alias is the name of any project's policy, and that each leads to a policy of its own
        project."""
        own = [*self.trained, *self.answered_elsewhere]
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

    @model_validator(mode="after")
    def _device_of_steps(self) -> Self:
        if self.trainer.policies_at_once > 1 and self.vllm.shares_device:
            raise ValueError(
                "vLLM sleeps while one policy's step computes, and could not probe another's candidate: set "
                "trainer.policies_at_once to 1, or vllm.shares_device to false"
            )
        if self.trainer.sharding == "fsdp" and self.vllm.shares_device:
            raise ValueError(
                "trainer.sharding is fsdp, and a sharded base model stays on its devices, so vLLM cannot have them "
                "between steps: set vllm.shares_device to false and trainer.devices to other GPUs than vllm.devices, "
                "or trainer.sharding to none"
            )
        return self

    @model_validator(mode="after")
    def _done_by_the_service(self) -> Self:
        if self.training_service is None:
            return self
        self.training_service.check(self.trainer)
        if self.launcher.command:
            raise ValueError(
                "launcher.command would start a machine for what training_service computes: remove one of the two"
            )
        if self.vllm.shares_device:
            raise ValueError(
                "vLLM would sleep while a training service computes on other devices: set vllm.shares_device to false"
            )
        return self

    @model_validator(mode="after")
    def _time_for_the_store(self) -> Self:
        most_s = FILES * self.adapters.timeout_s
        if self.adapters.is_remote and most_s >= self.trainer.lease_s:
            raise ValueError(
                f"adapters.timeout_s = {self.adapters.timeout_s:g} for each of {FILES} files must be less than "
                f"trainer.lease_s = {self.trainer.lease_s:g}: a step that pulls an adapter would be taken over"
            )
        return self

    def of_projects(self) -> list[Self]:
        """Return the settings of each project, the home project's first: its own name, policies, aliases, upstreams.

        Code that is written for `project` alone works on each of them.
        """
        return [self.of_project(name) for name in dict.fromkeys((self.home, *self.projects))]

    def of_project(self, name: str) -> Self:
        """Return the settings of one project.

        Raises:
            SettingsError: there is no such project.
        """
        if name not in (self.home, *self.projects):
            raise SettingsError(
                f"there is no project {name!r}; there are: {', '.join(dict.fromkeys((self.home, *self.projects)))} "
                f"(section [projects.{name}])"
            )
        if self._whole is not None:
            raise SettingsError(f"these are the settings of {self.project!r} already")
        own = self.projects.get(name, ProjectSettings())
        policies = own.policies if name != self.project else (self.policy, *self.policies, *own.policies)
        copy = self.model_copy(
            update={
                "project": name,
                "policy": policies[0],
                "policies": policies[1:],
                "projects": {},
                "learning": {policy: one for policy, one in self.learning.items() if policy in policies},
                "aliases": own.aliases if name != self.project else self.aliases | own.aliases,
                "upstreams": {key: one for key, one in self.upstreams.items() if (one.project or self.project) == name},
            }
        )
        copy._whole = self
        return copy

    def of_policy(self, policy: str | None) -> Self:
        """Return the settings of the project that has this policy, else the home project's."""
        return next((own for own in self.of_projects() if policy in own.trained), self.of_project(self.project))

    @property
    def home(self) -> str:
        """Name of the home project, which owns what all projects share: the servers and the lease of the
        accelerator."""
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
    def answered_elsewhere(self) -> tuple[str, ...]:
        """The project's policies that other servers answer."""
        return tuple(name for upstream in self.upstreams.values() for name in upstream.models)

    @property
    def privacy(self) -> PrivacySettings:
        """The project's privacy settings."""
        return (self._whole or self).projects.get(self.project, ProjectSettings()).privacy

    @property
    def all_projects(self) -> tuple[str, ...]:
        """The names of all projects, the home project's first."""
        return tuple(dict.fromkeys((self.home, *(self._whole or self).projects)))

    @property
    def upstream_prices(self) -> dict[tuple[str, str], Prices]:
        """The known prices of other servers' models, by project and policy, of all projects."""
        whole = self._whole or self
        prices: dict[tuple[str, str], Prices] = {}
        for server in whole.upstreams.values():
            price = known_prices(server.usd_per_million_prompt_tokens, server.usd_per_million_completion_tokens)
            for policy in server.models:
                if (own := whole._price_as_teacher(policy) or price) is not None:
                    prices[server.project or whole.project, policy] = own
        return prices

    def _price_as_teacher(self, policy: str) -> Prices | None:
        """Return the price of a handover's teacher; None of other policies."""
        handovers = (one.handover for one in self.learning.values() if one.handover is not None)
        for one in handovers:
            if one.teacher == policy:
                return known_prices(one.usd_per_million_prompt_tokens, one.usd_per_million_completion_tokens)
        return None

    def learning_of(self, policy: str) -> RewardSettings:
        """Return the policy's reward settings, or the defaults."""
        return self.learning.get(policy, RewardSettings())

    def parts_learning_of(self, policy: str) -> RewardSettings | None:
        """Return the policy's reward settings where its steps compare the parts of rewards; else None."""
        return self.learning_of(policy) if self.trainer.compares_parts else None

    @property
    def database_url(self) -> str:
        """URL of the database: the setting, or SQLite in the data folder."""
        return self.database or f"sqlite:///{self.data.resolve() / 'whetstone.db'}"

    @property
    def served_name(self) -> str:
        """Name under which vLLM serves the base model: version 0 of the policy."""
        return f"{self.policy}@v0"


def load(config: Path | None = None, environment: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings: defaults, then the file, then the environment, then `overrides` (`__` for dots; None skips).

    The file is `config`, else the one that WHETSTONE_CONFIG names, else whetstone.toml if it exists. A variable
    `…_FILE` is replaced by the content of its file; without `environment`, this changes the environment of the process
    itself.

    Raises:
        SettingsError: the file is missing or not TOML, a key is unknown, or a value is out of bounds.
    """
    environment = os.environ if environment is None else dict(environment)
    files = [name for name in environment if name.startswith(PREFIX) and name.endswith(SUFFIX)]
    take_up(environment, [name.removesuffix(SUFFIX) for name in files])
    file, is_named = config_file(config, environment)
    values = _read(file, required=is_named)
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
    servers: tuple[JudgeSettings | UpstreamSettings | TeacherSettings | TrainingServiceSettings, ...] = (
        *settings.judges.values(),
        *settings.upstreams.values(),
        *settings.teachers.values(),
        *([settings.training_service] if settings.training_service else ()),
    )
    langfuse = LANGFUSE_VARIABLES if settings.log.langfuse_url is not None else ()
    keys = [one.api_key_env for one in servers if one.api_key_env is not None]
    take_up(environment, [*keys, *langfuse, HUB_TOKEN_VARIABLE])
    return settings


def config_file(config: Path | None = None, environment: Mapping[str, str] | None = None) -> tuple[Path, bool]:
    """Return the path of the settings file, and whether it was named: the default one need not exist."""
    variable = (os.environ if environment is None else environment).get(CONFIG_VARIABLE)
    named = config or (Path(variable) if variable else None)
    return named or Path("whetstone.toml"), named is not None


def as_environment(settings: Settings, config: Path | None = None) -> dict[str, str]:
    """Return the environment variables with which a child process loads exactly these settings."""
    return {
        **{PREFIX + "__".join(path).upper(): text for path, text in _flatten(settings)},
        PREFIX + "DATA": str(settings.data.resolve()),
        **({CONFIG_VARIABLE: str(config.resolve())} if config else {}),
    }


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise SettingsError(f"{path}: there is no such file") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error


def _put(values: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{name}: {key} is a single value, not a section")
    values[path[-1]] = _decoded(value, name) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _decoded(text: str, name: str) -> Any:
    """Parse a list or a table, written as JSON or as TOML."""
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
        elif dumped is not None:
            yield (*path, key), json.dumps(dumped) if isinstance(dumped, list | dict) else str(dumped)


def _explain(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        nearest = suggestion(Settings, problem["loc"])
        hint = f"; did you mean {nearest!r}?" if nearest else "; docs/settings.md lists them all"
        return f"unknown setting {key!r}{hint}"
    why = problem["msg"].removeprefix("Value error, ")
    message = f"setting {key!r}: {why}" if key else why
    # The input of a rule over several settings is all of them, passwords included.
    shows_input = not isinstance(problem["input"], dict) and NEVER_SHOWN.isdisjoint(problem["loc"])
    return f"{message} (got {problem['input']!r})" if shows_input else message
