"""docker-compose.yml, read as far as it can be without an engine: by its schema, and against what `up` starts."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from whetstone.config.settings import STARTER, Settings, load
from whetstone.stack import stack
from whetstone.vllm.launch import arguments

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests/schemas/compose-spec.json").read_text(encoding="utf-8"))
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])((?:[^{}]|\{[^{}]*\})*))?\}")
OURS = {"migrate", "proxy", "judge", "trainer-cpu", "trainer-gpu"}
VLLM = {"vllm-cpu", "vllm-gpu"}
SET_OUTSIDE = {"WHETSTONE_TAG", "PIP_EXTRA_INDEX_URL", "OPENAI_API_KEY", "HF_TOKEN", "WHETSTONE_PUBLISH"}
"""Variables that an operator may set, and no file of ours does."""


def variables(name: str) -> dict[str, str]:
    """What an env file of ours sets."""
    lines = (ROOT / "containers" / f"{name}.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def interpolated(text: str, given: dict[str, str]) -> str:
    """As Compose puts variables in; `$$` stays for the shell."""

    def value(found: re.Match[str]) -> str:
        name, operator, rest = found.groups()
        assert operator != "?" or given.get(name), f"{name}: {rest}"
        return given.get(name) or (rest if operator == "-" else "")

    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return VARIABLE.sub(value, "\n".join(lines))


def kind(name: str) -> str:
    """The profile that an env file chooses: one GPU or two, the services are the same."""
    return variables(name)["COMPOSE_PROFILES"]


def composed(name: str) -> dict[str, Any]:
    """The file with the variables of one of our env files, merged."""
    text = interpolated((ROOT / "docker-compose.yml").read_text(encoding="utf-8"), variables(name))
    told: dict[str, Any] = yaml.safe_load(text)
    return told


@pytest.fixture(params=["cpu", "gpu1", "gpu"])
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def compose(profile: str) -> dict[str, Any]:
    return composed(profile)


def services(compose: dict[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """Those that start with the profile."""
    chosen = {None, kind(profile), "watch"}
    return {name: one for name, one in compose["services"].items() if chosen & set(one.get("profiles", [None]))}


def of_service(service: dict[str, Any]) -> Settings:
    """The settings that a container of ours loads; its secrets as its files would give them."""
    told = {name: str(value) for name, value in service["environment"].items() if name.startswith("WHETSTONE_")}
    secret = {name.removesuffix("_FILE"): "x" * 40 for name in told if name.endswith("_FILE")}
    plain = {name: value for name, value in told.items() if not name.endswith("_FILE")}
    plain["WHETSTONE_CONFIG"] = str(ROOT / "containers" / "whetstone.toml")
    return load(environment=plain | secret)


def test_it_is_what_the_compose_specification_says(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, SCHEMA)


def test_what_is_no_compose_file_is_told_apart(compose: dict[str, Any]) -> None:
    compose["services"]["proxy"]["restrat"] = "always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(compose, SCHEMA)


def test_it_says_what_is_missing_where_no_env_file_is_given() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    sentence = "start with --env-file containers/cpu.env, containers/gpu1.env or containers/gpu.env"
    assert f"${{WHETSTONE_MODEL:?{sentence}}}" in text
    asked = {found[1] for found in VARIABLE.finditer(text)}
    given = {name for file in ("cpu", "gpu1", "gpu") for name in variables(file)}
    assert asked - given == SET_OUTSIDE and given - asked == {"COMPOSE_PROFILES"}


def test_each_profile_has_one_server_and_one_trainer(compose: dict[str, Any], profile: str) -> None:
    assert set(services(compose, profile)) == {
        "postgres", "redis", "migrate", "proxy", "judge", f"vllm-{kind(profile)}", f"trainer-{kind(profile)}",
        "prometheus", "grafana",
    }  # fmt: skip
    assert kind(profile) == profile.removesuffix("1")


class Recording:
    """A supervisor that starts nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.commands: dict[str, list[str]] = {}

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def start(self, part: Any) -> None:
        self.commands[part.name] = ["python", *part.command[1:]]


def test_the_services_run_what_up_runs(compose: dict[str, Any], profile: str, tmp_path: Path) -> None:
    settings = of_service(compose["services"]["proxy"])
    recording = Recording(tmp_path)
    stack._start_workers(settings, recording, {})  # type: ignore[arg-type]
    recording.start(stack._proxy(settings, "http://127.0.0.1:8000", {}))
    told = {name.split("-")[0]: one["command"] for name, one in services(compose, profile).items() if name in OURS}
    assert told.pop("migrate") == ["whetstone", "migrate"]
    assert told == recording.commands


def test_vllm_is_started_as_our_own_settings_say(compose: dict[str, Any], profile: str) -> None:
    service, settings = compose["services"][f"vllm-{kind(profile)}"], of_service(compose["services"]["proxy"])
    command = [part for one in service["command"] for part in one.split("=", 1)]
    model = str(STARTER) if profile == "cpu" else settings.model
    # The starter's files lie elsewhere here than in the image.
    here = settings.model_copy(update={"model": model})
    wanted = arguments(here, cpu=profile == "cpu")
    wanted[wanted.index("--model") + 1] = settings.model
    start = service["entrypoint"]
    program, *of_build = (shlex.split(start) if isinstance(start, str) else start)[2:]
    assert program == "vllm.entrypoints.openai.api_server"
    of_card = ["--gpu-memory-utilization=0.85"] if profile == "gpu1" else []  # by the plan for a card, not by a setting
    assert set(of_card) <= set(of_build)
    command += [part for one in of_build if one not in of_card for part in one.split("=", 1)]
    assert sorted(command) == sorted(wanted)


def test_vllms_environment_is_what_up_gives_it(compose: dict[str, Any], profile: str) -> None:
    from whetstone.vllm.client import environment

    settings = of_service(compose["services"]["proxy"])
    told = compose["services"][f"vllm-{kind(profile)}"]["environment"]
    assert told.items() >= environment(settings).items()


def devices(service: dict[str, Any]) -> list[str]:
    """The GPUs of a service, by their numbers."""
    reserved = service["deploy"]["resources"].get("reservations", {}).get("devices", ())
    return [number for one in reserved for number in one["device_ids"]]


def test_each_part_sees_the_gpus_that_are_its_own(compose: dict[str, Any], profile: str) -> None:
    """A container sees no other GPU than those that it reserves."""
    serving, training = (devices(compose["services"][f"{part}-{kind(profile)}"]) for part in ("vllm", "trainer"))
    expected = {"cpu": ([], []), "gpu1": (["0"], ["0"]), "gpu": (["0"], ["1"])}
    assert (serving, training) == expected[profile]
    # On the same GPU vLLM must leave it while a step trains.
    settings = of_service(compose["services"]["proxy"])
    assert settings.vllm.shares_device == bool(set(serving) & set(training))


def test_what_compiles_kernels_may_execute_them(compose: dict[str, Any]) -> None:
    """Docker mounts a tmpfs with noexec unless told otherwise."""
    for name in ("vllm-gpu", "trainer-gpu"):
        assert all(one.partition(":")[2].split(",")[-1] == "exec" for one in compose["services"][name]["tmpfs"]), name


def test_a_token_of_the_hub_reaches_whatever_loads_a_model() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    told = yaml.safe_load(interpolated(text, variables("gpu") | {"HF_TOKEN": "hf_x"}))["services"]
    having = {name for name, one in told.items() if one.get("environment", {}).get("HF_TOKEN") == "hf_x"}
    assert having == VLLM | {"trainer-cpu", "trainer-gpu"}


def test_unsloth_is_trained_with_as_up_would(tmp_path: Path) -> None:
    override = yaml.safe_load(interpolated((ROOT / "containers/unsloth.yml").read_text(encoding="utf-8"), {}))
    jsonschema.validate(override, SCHEMA)
    ((name, changed),) = override["services"].items()
    service = {**composed("gpu")["services"][name], **changed}
    proxy = composed("gpu")["services"]["proxy"]
    settings = of_service({"environment": {**proxy["environment"], **changed["environment"]}})
    recording = Recording(tmp_path)
    stack._start_workers(settings, recording, {})  # type: ignore[arg-type]
    assert service["command"] == recording.commands["trainer"]
    assert service["image"] == f"whetstone/{service['build']['target']}:local"
    assert f"AS {service['build']['target']}\n" in (ROOT / "containers/Dockerfile").read_text(encoding="utf-8")


def test_our_containers_have_settings_that_load_and_agree(compose: dict[str, Any], profile: str) -> None:
    ours = {name: of_service(one) for name, one in services(compose, profile).items() if name in OURS}
    assert len({(one.model, one.policy, one.vllm.urls, one.database, one.broker) for one in ours.values()}) == 1
    proxy = ours["proxy"]
    assert proxy.vllm.urls == ("http://vllm:8001",) and not proxy.proxy.on_loopback


def test_nobody_is_root_and_nobody_writes_but_to_volumes(compose: dict[str, Any]) -> None:
    for name, one in compose["services"].items():
        assert str(one["user"]).split(":")[0] not in ("0", "root"), name
        assert one["read_only"] is True, name
        assert one["cap_drop"] == ["ALL"] and "no-new-privileges:true" in one["security_opt"], name
        assert not one.get("privileged") and "docker.sock" not in str(one.get("volumes")), name


def test_each_has_bounds_and_comes_again(compose: dict[str, Any]) -> None:
    for name, one in compose["services"].items():
        limits = one["deploy"]["resources"]["limits"]
        assert "memory" in limits and "pids" in limits, name
        assert one["restart"] == ("no" if name == "migrate" else "unless-stopped"), name
        assert one["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_what_others_wait_for_says_how_it_is(compose: dict[str, Any]) -> None:
    for name, one in compose["services"].items():
        waits = one.get("depends_on", {})
        for other, how in waits.items() if isinstance(waits, dict) else ():
            told = compose["services"][other]
            if how["condition"] == "service_healthy":
                assert told["healthcheck"]["test"], (name, other)
            else:
                assert how["condition"] == "service_completed_successfully" and told["restart"] == "no", (name, other)
    for name in OURS | VLLM - {"migrate"}:
        assert name == "migrate" or compose["services"][name]["healthcheck"]["test"]


def test_images_are_pinned_or_made_here(compose: dict[str, Any]) -> None:
    stages = re.findall(
        r"^FROM .* AS (\S+)$", (ROOT / "containers/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for name, one in compose["services"].items():
        if "build" in one:
            assert (ROOT / one["build"]["dockerfile"]).is_file() and one["build"]["target"] in stages, name
            assert one["image"] == f"whetstone/{one['build']['target']}:local"
        else:
            assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+(\.\d+)?(-[a-z]+)?", one["image"]), name


def test_no_secret_stands_in_the_environment(compose: dict[str, Any]) -> None:
    for name, one in compose["services"].items():
        for variable, value in (one.get("environment") or {}).items():
            if re.search(r"PASSWORD|SECRET|KEY|DATABASE|BROKER", variable) and variable != "OPENAI_API_KEY":
                assert variable.endswith("_FILE"), (name, variable)
                assert value.removeprefix("/run/secrets/") in one["secrets"], (name, variable)


def test_every_secret_is_made_by_the_script_and_made_once(compose: dict[str, Any], tmp_path: Path) -> None:
    script, folder = ROOT / "containers" / "secrets.sh", tmp_path / "secrets"
    subprocess.run(["sh", script, folder], check=True, capture_output=True)
    made = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert set(made) == {Path(one["file"]).name for one in compose["secrets"].values()}
    assert folder.stat().st_mode & 0o077 == 0
    subprocess.run(["sh", script, folder], check=True, capture_output=True)
    assert made == {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert f":{made['postgres_password'].strip()}@postgres:5432/" in made["database"]
    assert f":{made['redis.conf'].split()[1]}@redis:6379/" in made["broker"]
    assert len(made["admin_key"].strip()) >= 32
    assert (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines().count("secrets/") == 1


def test_every_secret_volume_and_network_is_declared_and_used(compose: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"secrets": set(), "networks": set(), "volumes": set(), "configs": set()}
    for one in compose["services"].values():
        used["secrets"] |= set(one.get("secrets", ()))
        used["networks"] |= set(one["networks"])
        used["volumes"] |= {volume.split(":")[0] for volume in one.get("volumes", ()) if not volume.startswith(".")}
        used["configs"] |= {config["source"] for config in one.get("configs", ())}
    for kind, names in used.items():
        assert set(compose[kind]) == names, kind


def test_the_files_that_it_mounts_are_there(compose: dict[str, Any]) -> None:
    mounted = [volume.split(":")[0] for one in compose["services"].values() for volume in one.get("volumes", ())]
    mounted += [one["file"] for one in compose["configs"].values()]
    assert all((ROOT / path).exists() for path in mounted if path.startswith("."))


def test_only_our_own_programs_reach_the_model_server(compose: dict[str, Any]) -> None:
    reach = {name for name, one in compose["services"].items() if "models" in one["networks"]}
    assert reach == VLLM | {"proxy", "judge", "trainer-cpu", "trainer-gpu"}
    assert not any("ports" in compose["services"][name] for name in VLLM | {"postgres", "redis"})
    assert compose["networks"]["inner"]["internal"] is True


def test_what_is_published_is_this_machines_alone(compose: dict[str, Any]) -> None:
    for one in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in one.get("ports", ()))


def test_who_writes_adapters_and_who_reads_them_agree_on_the_path(compose: dict[str, Any]) -> None:
    for name in ("proxy", *VLLM):
        assert "adapters:/data/adapters:ro" in compose["services"][name]["volumes"]
    for name in ("trainer-cpu", "trainer-gpu"):
        assert "adapters:/data/adapters" in compose["services"][name]["volumes"]


def test_a_stop_leaves_time_for_what_is_under_way(compose: dict[str, Any]) -> None:
    settings = of_service(compose["services"]["proxy"])
    grace_s = int(compose["services"]["proxy"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings.proxy.drain_timeout_s + 25


def strings(value: Any) -> Iterator[str]:
    """All that is text in it."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for one in value:
            yield from strings(one)
    elif isinstance(value, str):
        yield value


def test_nothing_is_left_to_be_put_in(compose: dict[str, Any]) -> None:
    assert not [text for text in strings(compose) if "${" in text]


def test_the_commands_in_its_head_name_files_that_are_there() -> None:
    head = (ROOT / "docker-compose.yml").read_text(encoding="utf-8").split("name: whetstone")[0]
    words = [word for line in head.splitlines() for word in _words(line.lstrip("# "))]
    named = {word for word in words if word.startswith("containers/")}
    assert named == {"containers/secrets.sh", *(f"containers/{name}.env" for name in ("cpu", "gpu1", "gpu"))}
    assert all((ROOT / word).is_file() for word in named)


def _words(line: str) -> list[str]:
    with suppress(ValueError):
        return shlex.split(line, comments=True)
    return line.split()
