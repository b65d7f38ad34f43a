"""The alerts by Prometheus' own tool: their syntax, and what they say to figures that are given."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_grafana import ALL

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def promtool() -> Iterator[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.fail("these tests did not run: no promtool here; `apt-get install prometheus` brings it", pytrace=False)
    yield found


def ran(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_what_prometheus_says(promtool: str) -> None:
    assert "rules found" in ran([promtool, "check", "rules", ROOT / "containers/prometheus/alerts.yml"])


def test_the_scrape_is_what_prometheus_says(promtool: str, tmp_path: Path) -> None:
    text = (ROOT / "containers/prometheus/prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "key").write_text("k")
    text = text.replace("/run/secrets/admin_key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus", str(ROOT / "containers/prometheus")))
    ran([promtool, "check", "config", tmp_path / "prometheus.yml"])


def test_the_alerts_say_what_they_should(promtool: str) -> None:
    assert "SUCCESS" in ran([promtool, "test", "rules", Path(__file__).with_name("alerts_test.yml")])


def test_every_expression_of_the_dashboard_is_one(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"one:{number}", "expr": text.replace("$__rate_interval", "5m")}
        for number, (where, text) in enumerate(ALL)
        if "$" not in where
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    ran([promtool, "check", "rules", path])
