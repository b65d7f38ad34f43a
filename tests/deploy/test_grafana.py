"""Dashboard and alerts ask for figures that `/metrics` tells, by labels that these have; each alert says what to do."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from migrations.views import BY_NAME
from tests.promql import NoPromql, read
from whetstone.config.settings import Settings
from whetstone.domain.suggestions import keys_of
from whetstone.observability import metric_names

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "containers" / "grafana" / "dashboards").glob("*.json"))
ALERTS = yaml.safe_load((ROOT / "containers" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
SCRAPE = yaml.safe_load((ROOT / "containers" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
OF_THE_SCRAPE = {"job", "instance"}
"""Labels that Prometheus itself adds."""
OF_VLLM = {"engine", "model_name"}
LABELS = {name: one.labels for one in metric_names.ALL for name in one.series_names} | {"up": ()}
FROM_ALL = {name for one in (*metric_names.DATABASE, *metric_names.VLLM) for name in one.series_names}


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in dashboard["panels"] if panel["type"] != "row")


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands -> a PromQL expression."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in panels(dashboard):
            yield from ((f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"])
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.stem}: ${variable['name']}", variable["definition"]
        yield from ((f"{path.stem}: {one['name']}", one["expr"]) for one in dashboard["annotations"]["list"])
    yield from ((rule["alert"], rule["expr"]) for rule in rules())


ALL = list(expressions())


@pytest.mark.parametrize(
    "expression", [text for _, text in ALL], ids=[f"{where}-{n}" for n, (where, _) in enumerate(ALL)]
)
def test_it_asks_for_figures_that_are_told_by_labels_that_they_have(expression: str) -> None:
    asked = read(expression)
    assert asked.names and asked.names <= LABELS.keys(), asked.names - LABELS.keys()
    known = OF_THE_SCRAPE | {label for name in asked.names for label in LABELS[name]}
    known |= {"le"} if any(name.endswith("_bucket") for name in asked.names) else set()
    known |= OF_VLLM if any(name.startswith("vllm:") for name in asked.names) else set()
    assert asked.labels <= known, asked.labels - known


@pytest.mark.parametrize("expression", [text for where, text in ALL if not where.split(": ")[-1].startswith("$")])
def test_what_every_proxy_tells_alike_is_not_added_up(expression: str) -> None:
    """Two proxies tell the same of the database: a sum over them would be twice as much."""
    for name in read(expression).names & FROM_ALL:
        for found in re.finditer(re.escape(name), expression):
            assert re.search(
                r"(max|avg)(?: by \([^)]*\))? \((?:\w+\()?$|(max|avg)\($|max\((?:\w+\()?$", expression[: found.start()]
            ), expression


def test_every_figure_of_ours_is_shown_or_watched() -> None:
    asked = {name for _, text in ALL for name in read(text).names}
    unseen = {one.name for one in (*metric_names.PROXY, *metric_names.DATABASE) if not asked & set(one.series_names)}
    assert unseen == {
        # Told for those who look closer.
        "whetstone_dropped_texts", "whetstone_judge_tokens", "whetstone_step_sampled_tokens",
        "whetstone_step_advantage_spread", "whetstone_step_learning_rate", "whetstone_step_seconds",
        "whetstone_step_read_tokens", "whetstone_step_rows", "whetstone_step_state_share", "whetstone_handover_share",
    }  # fmt: skip


def test_what_is_no_expression_is_told_apart() -> None:
    for wrong in ("sum(rate(x[5m])", "sum)x(", "summ(x)"):
        with pytest.raises(NoPromql):
            read(wrong)
    asked = read('sum by (le, policy) (rate(a_bucket{p=~"x(y", q!="b"}[5m])) / on (r) max(b) > 1e9')
    assert asked.names == {"a_bucket", "b"} and asked.labels == {"le", "policy", "p", "q", "r"}


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert re.fullmatch(r"Whetstone[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert set(rule["annotations"]) == {"summary", "remedy"} and rule["annotations"]["remedy"].endswith((".", ";"))
        for field in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert field in read(rule["expr"]).labels | OF_THE_SCRAPE, rule["alert"]


def test_what_alerts_advise_is_there() -> None:
    """Pages that exist, settings that exist, views that exist."""
    keys = {key.rsplit(".", 1)[-1] for key in keys_of(Settings)}
    for rule in rules():
        remedy = rule["annotations"]["remedy"]
        assert all((ROOT / page).is_file() for page in re.findall(r"docs/\w+\.md", remedy)), rule["alert"]
        for section, key in re.findall(r"\b(proxy|trainer|vllm|groups)\.([a-z_]{4,})\b", remedy):
            assert key in keys or key == "log", (rule["alert"], section, key)
        assert set(re.findall(r"\badmin_\w+", remedy)) <= BY_NAME.keys(), rule["alert"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_one_that_grafana_can_take(path: Path) -> None:
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    assert dashboard["uid"] and dashboard["title"] and dashboard["id"] is None and dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["type"] in ("stat", "timeseries")
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", " ".join(text for _, text in ALL))) - {"__rate_interval"}
    assert used | {"datasource"} == variables


def test_prometheus_reads_the_alerts_and_asks_where_the_proxy_tells() -> None:
    assert SCRAPE["rule_files"] == ["/etc/prometheus/alerts.yml"]
    (job,) = SCRAPE["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["job_name"] == "whetstone"
    assert job["authorization"]["credentials_file"] == "/run/secrets/admin_key"
    assert job["dns_sd_configs"][0]["names"] == ["proxy"] and job["dns_sd_configs"][0]["port"] == 8000
