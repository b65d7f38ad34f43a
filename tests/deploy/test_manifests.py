"""The Kubernetes manifests and the SkyPilot task, by the schemas of both, and against what `up` starts."""

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.test_compose import Recording
from whetstone.config.settings import Settings, load
from whetstone.stack import stack
from whetstone.vllm import client
from whetstone.vllm.launch import arguments

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers" / "kubernetes"
SCHEMAS = json.loads((ROOT / "tests/schemas/kubernetes-1.37.json").read_text(encoding="utf-8"))
TASK = json.loads((ROOT / "tests/schemas/skypilot-task.json").read_text(encoding="utf-8"))
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
OURS = {"migrate", "proxy", "judge", "trainer"}
NAME = "app.kubernetes.io/name"

Resource = dict[str, Any]


def resources() -> list[Resource]:
    """All that the kustomization has."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in KUSTOMIZATION["resources"]]
    return [one for text in texts for one in yaml.safe_load_all(text)]


def check(resource: Resource) -> None:
    """By the strict schema of its kind: a field that nobody knows is an error."""
    schema = SCHEMAS["kinds"][f"{resource['apiVersion']} {resource['kind']}"]
    jsonschema.Draft202012Validator({**schema, "$defs": SCHEMAS["$defs"]}).validate(resource)


def named(resource: Resource) -> str:
    return f"{resource['kind']}/{resource['metadata']['name']}"


def of_kind(*kinds: str) -> dict[str, Resource]:
    return {one["metadata"]["name"]: one for one in resources() if one["kind"] in kinds}


def workloads() -> dict[str, Resource]:
    """Name -> what runs pods."""
    return of_kind("Deployment", "StatefulSet", "Job")


def pod(workload: Resource) -> Resource:
    told: Resource = workload["spec"]["template"]["spec"]
    return told


def container(workload: Resource) -> Resource:
    (one,) = pod(workload)["containers"]
    assert isinstance(one, dict)
    return one


def environment() -> dict[str, str]:
    """What the generated ConfigMap gives our pods."""
    (found,) = [one for one in KUSTOMIZATION["configMapGenerator"] if one["name"] == "environment"]
    return dict(text.split("=", 1) for text in found["literals"])


def settings_of(workload: Resource) -> Settings:
    """The settings that a pod of ours loads; its secrets as its files would give them."""
    given = environment() | {one["name"]: one["value"] for one in container(workload).get("env", ()) if "value" in one}
    ours = {name: value for name, value in given.items() if name.startswith("WHETSTONE_")}
    plain = {name: value for name, value in ours.items() if not name.endswith("_FILE")}
    plain |= {name.removesuffix("_FILE"): "x" * 40 for name in ours if name.endswith("_FILE")}
    return load(environment=plain | {"WHETSTONE_CONFIG": str(FOLDER / "whetstone.toml")})


@pytest.mark.parametrize("resource", resources(), ids=named)
def test_each_is_what_kubernetes_says(resource: Resource) -> None:
    check(resource)


def test_the_example_of_the_secret_is_too_and_has_every_key_that_a_pod_asks_for() -> None:
    secret = yaml.safe_load((FOLDER / "secrets.example.yaml").read_text(encoding="utf-8"))
    check(secret)
    asked = {
        item["key"]
        for one in workloads().values()
        for volume in pod(one)["volumes"]
        for item in volume.get("secret", {}).get("items", ())
    }
    assert asked == set(secret["stringData"])
    assert "secrets.example.yaml" not in KUSTOMIZATION["resources"]


@pytest.mark.parametrize("path", [("spec", "replicaz"), ("spec", "template", "spec", "containers", 0, "livenesProbe")])
def test_a_field_that_nobody_knows_is_told(path: tuple[Any, ...]) -> None:
    resource = workloads()["judge"]
    inner: Any = resource
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = 1
    with pytest.raises(jsonschema.ValidationError):
        check(resource)


def test_every_file_of_the_folder_is_in_the_kustomization_and_the_other_way_round() -> None:
    aside = {"kustomization.yaml", "secrets.example.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} - aside == set(KUSTOMIZATION["resources"])
    mapped = [file for one in KUSTOMIZATION["configMapGenerator"] for file in one.get("files", ())]
    assert all((FOLDER / file).is_file() for file in mapped)
    assert KUSTOMIZATION["kind"] == "Kustomization" and KUSTOMIZATION["namespace"] == "whetstone"


def test_the_pods_run_what_up_runs(tmp_path: Path) -> None:
    settings = settings_of(workloads()["proxy"])
    recording = Recording(tmp_path)
    stack._start_workers(settings, recording, {})  # type: ignore[arg-type]
    recording.start(stack._proxy(settings, "http://127.0.0.1:8000", {}))
    told = {name: container(one)["command"] for name, one in workloads().items() if name in OURS}
    assert told.pop("migrate") == ["whetstone", "migrate"]
    assert told == recording.commands


def test_vllm_is_started_as_our_own_settings_say() -> None:
    settings, told = settings_of(workloads()["proxy"]), container(workloads()["vllm"])
    given = "\n".join(told["args"])
    for variable in ("WHETSTONE_MODEL", "WHETSTONE_POLICY"):
        given = given.replace(f"$({variable})", environment()[variable])
    assert sorted(part for one in given.splitlines() for part in one.split("=", 1)) == sorted(arguments(settings))
    variables = {one["name"]: one["value"] for one in told["env"] if "value" in one}
    assert variables.items() >= client.environment(settings).items()


def test_a_token_of_the_hub_reaches_whatever_loads_a_model() -> None:
    asked = {
        name
        for name, one in workloads().items()
        for variable in container(one).get("env", ())
        if variable["name"] == "HF_TOKEN" and variable["valueFrom"]["secretKeyRef"]["optional"] is True
    }
    assert asked == {"vllm", "trainer"}
    assert "`hf_token`" in (FOLDER / "secrets.example.yaml").read_text(encoding="utf-8")


def test_our_pods_have_settings_that_load_and_agree() -> None:
    ours = [settings_of(workloads()[name]) for name in OURS]
    assert len({(one.model, one.policy, one.vllm.urls, one.database, one.broker) for one in ours}) == 1
    addresses = [f"http://vllm-{number}.vllm:8001" for number in range(workloads()["vllm"]["spec"]["replicas"])]
    assert list(ours[0].vllm.urls) == addresses


def test_nobody_is_root_writes_but_to_volumes_or_asks_the_cluster() -> None:
    for name, one in workloads().items():
        context = pod(one)["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        own = container(one)["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert pod(one)["automountServiceAccountToken"] is False and pod(one)["serviceAccountName"] == "whetstone"
    assert not any(one["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") for one in resources())


def test_each_has_bounds_and_says_how_it_is() -> None:
    for name, one in workloads().items():
        told = container(one)
        assert told["resources"]["limits"]["memory"] and told["resources"]["requests"]["cpu"], name
        assert name == "migrate" or "livenessProbe" in told, name
    proxy = container(workloads()["proxy"])
    assert proxy["livenessProbe"]["httpGet"]["path"] == proxy["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert proxy["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_what_is_mounted_is_declared_and_what_is_asked_for_exists() -> None:
    claims = set(of_kind("PersistentVolumeClaim"))
    for name, one in workloads().items():
        volumes = {volume["name"]: volume for volume in pod(one)["volumes"]}
        own = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        assert {mount["name"] for mount in container(one)["volumeMounts"]} == set(volumes) | own, name
        asked = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert asked <= claims, name
        named_maps = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        assert named_maps <= {one["name"] for one in KUSTOMIZATION["configMapGenerator"]}, name


def test_services_lead_to_pods_that_listen_there() -> None:
    for name, service in of_kind("Service").items():
        (workload,) = [one for one in workloads().values() if selects(service["spec"]["selector"], one)]
        ports = {port["name"]: port["containerPort"] for port in container(workload)["ports"]}
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"]), name
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP", name
    for name, workload in of_kind("StatefulSet").items():
        headless = of_kind("Service")[workload["spec"]["serviceName"]]
        assert headless["spec"]["clusterIP"] == "None", name


def selects(labels: dict[str, str], workload: Resource) -> bool:
    told: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return told.items() >= labels.items()


def reaching(name: str, port: int) -> set[str] | None:
    """Who may reach these pods there, by the policies; None: anybody."""
    allowed: set[str] = set()
    for policy in of_kind("NetworkPolicy").values():
        if policy["spec"]["podSelector"].get("matchLabels") != {NAME: name}:
            continue
        for rule in policy["spec"].get("ingress", ()):
            if port in [one["port"] for one in rule["ports"]]:
                if "from" not in rule:
                    return None
                allowed |= {source["podSelector"]["matchLabels"][NAME] for source in rule["from"]}
    return allowed


def test_only_our_own_programs_reach_the_model_servers_the_database_and_the_broker() -> None:
    assert of_kind("NetworkPolicy")["nobody"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert reaching("vllm", 8001) == {"proxy", "judge", "trainer"}
    assert reaching("postgres", 5432) == {"proxy", "judge", "trainer", "migrate"}
    assert reaching("redis", 6379) == {"proxy", "judge", "trainer"}
    assert reaching("proxy", 8000) is None
    assert set(workloads()) == {"vllm", "postgres", "redis", *OURS}


def test_the_autoscaler_and_the_budget_are_of_something_that_is_there() -> None:
    for one in of_kind("HorizontalPodAutoscaler").values():
        target = one["spec"]["scaleTargetRef"]
        assert named(workloads()[target["name"]]) == f"{target['kind']}/{target['name']}"
        assert "replicas" not in workloads()[target["name"]]["spec"], "two would say how many"
    for one in of_kind("PodDisruptionBudget").values():
        assert any(selects(one["spec"]["selector"]["matchLabels"], workload) for workload in workloads().values())


def test_a_proxys_journal_survives_its_pod() -> None:
    proxy = workloads()["proxy"]
    assert proxy["kind"] == "StatefulSet"
    (claim,) = proxy["spec"]["volumeClaimTemplates"]
    assert {"name": claim["metadata"]["name"], "mountPath": environment()["WHETSTONE_DATA"]} in container(proxy)[
        "volumeMounts"
    ]
    assert proxy["spec"]["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Retain"
    drain_s = settings_of(proxy).proxy.drain_timeout_s
    assert pod(proxy)["terminationGracePeriodSeconds"] >= drain_s + 5 + 25


def test_images_are_those_of_the_recipe_or_pinned() -> None:
    stages = [
        line.split()[-1]
        for line in (ROOT / "containers/Dockerfile").read_text("utf-8").splitlines()
        if line.startswith("FROM")
    ]
    renamed = {one["name"] for one in KUSTOMIZATION["images"]}
    for name, one in workloads().items():
        image = container(one)["image"]
        if image.startswith("whetstone/"):
            assert image in renamed and image.removeprefix("whetstone/") in stages, name
        else:
            assert image in (ROOT / "docker-compose.yml").read_text(encoding="utf-8"), name


@pytest.mark.parametrize("name", ["skypilot.yaml", "skypilot-trainer.yaml"])
def test_the_skypilot_task_is_what_skypilot_says(name: str) -> None:
    task = yaml.safe_load((ROOT / "containers" / name).read_text(encoding="utf-8"))
    jsonschema.validate(task, TASK)
    for wrong in ({"acelerators": "H100:2"}, {"disk_size": "much"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**task, "resources": wrong}, TASK)


def test_the_rented_trainer_has_settings_and_extras_that_exist() -> None:
    task = yaml.safe_load((ROOT / "containers" / "skypilot-trainer.yaml").read_text(encoding="utf-8"))
    settings = load(environment=task["envs"] | {"WHETSTONE_DATABASE": "postgresql+psycopg://db/whetstone"})
    assert settings.adapters.is_remote and settings.vllm.urls and settings.data.is_absolute()
    head = (ROOT / "containers" / "skypilot-trainer.yaml").read_text(encoding="utf-8").split("name: whetstone")[0]
    assert set(re.findall(r'"--secret", "(\w+)"', head.replace("\n#", ""))) == task["secrets"].keys()
    (asked,) = re.findall(r"\.\[(.*?)\]", task["setup"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(asked.split(",")) <= set(project["optional-dependencies"])
    module = task["run"].split("-m ")[1].strip()
    assert find_spec(module) is not None


def test_what_the_skypilot_task_runs_is_there() -> None:
    task = yaml.safe_load((ROOT / "containers" / "skypilot.yaml").read_text(encoding="utf-8"))
    assert sorted(set(files(task))) == ["containers/$GPUS.env", "containers/secrets.sh"]
    head = (ROOT / "containers" / "skypilot.yaml").read_text(encoding="utf-8").split("name: whetstone")[0]
    choices = {task["envs"]["GPUS"], *re.findall(r"GPUS=(\w+)", head)}
    assert choices == {"gpu", "gpu1"}
    assert all((ROOT / file.replace("$GPUS", one)).is_file() for file in files(task) for one in choices)


def files(task: Resource) -> Iterator[str]:
    for script in (task["setup"], task["run"]):
        yield from (word for word in script.split() if word.startswith("containers/"))
