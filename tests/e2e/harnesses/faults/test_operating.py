"""Faults as an operator sees them: the harnesses in their form for `make test-all`, and that they can fail."""

import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from benchmarks.faults.apps import AppLedger, SqlLedger
from benchmarks.faults.operating.alerts import Scrape, fires, parse
from benchmarks.faults.operating.disk import allow_refusals
from benchmarks.faults.operating.judged_rewards import GROUP_SIZE, unsettled
from benchmarks.faults.operating.lying_broker import Lies, LyingBroker
from benchmarks.faults.operating.scene import Report
from benchmarks.kit.redis_server import Redis
from migrations import schema
from tests.conftest import Seed

ROOT = Path(__file__).resolve().parents[4]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@needs_promtool
@pytest.mark.stack
@pytest.mark.long(part="harnesses")
@pytest.mark.parametrize("fault", ["frozen", "broker", "clock", "disk", "versions", "lost_folder"])
def test_nothing_is_lost_and_an_operator_sees_the_fault(fault: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.operating", fault, "--seed", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "it holds" in run.stdout


def test_what_a_proxy_reports_is_read_without_histograms() -> None:
    page = '# HELP x y\nwhetstone_a{b="c d"} 1.5\nwhetstone_h_bucket{le="1"} 3\nvllm:x 2\nwhetstone_n 1e9\n'
    assert parse(page) == {'whetstone_a{b="c d"}': 1.5, "whetstone_n": 1e9}


AWAY = "whetstone_database_away_seconds"


@needs_promtool
def test_an_alert_fires_from_its_own_time_on() -> None:
    scrapes = [Scrape(float(second), {AWAY: max(0.0, second - 10.0)}) for second in range(70)]
    assert not fires(scrapes, "WhetstoneDatabaseAway", 35)
    assert fires(scrapes, "WhetstoneDatabaseAway", 60)


@needs_promtool
def test_a_rule_that_waits_is_looked_at_after_more_of_the_same() -> None:
    lag = "whetstone_assembly_lag_seconds"
    scrapes = [Scrape(float(second), {lag: float(second)}) for second in range(20)]
    assert not fires(scrapes, "WhetstoneJudgingStands", 19)
    assert not fires(scrapes, "WhetstoneJudgingStands", 19, 700)
    assert fires(scrapes, "WhetstoneJudgingStands", 19, 700, {lag: 1.0})


@needs_promtool
def test_a_proxy_that_answers_no_scrape_is_down_and_its_figures_count_no_more() -> None:
    scrapes = [Scrape(0.0, {AWAY: 100.0}), *(Scrape(float(second)) for second in range(1, 100))]
    assert not fires(scrapes, "WhetstoneDatabaseAway", 90)
    assert fires(scrapes, "WhetstoneProxyDown", 90)


def test_what_apps_have_and_sql_has_not_is_a_fault() -> None:
    report = Report()
    report.run.received = AppLedger({"c0": 0, "c1": 1}, {})
    report.lost_or_twice(SqlLedger([("c0", 0), ("x", 0)], [], [], Counter()))
    assert len(report.faults) == 2 and "SQL has not: c1" in report.faults[0] and "twice" in report.faults[1]


def test_refusals_count_as_right_only_while_the_disk_is_broken() -> None:
    report = Report()
    refused = "request 1, sent with the database away: 503 b'not_recorded'"
    other = "request 2, sent with the database there: 503 b'not_recorded'"
    report.run.failed = [refused, other]
    allow_refusals(report)
    assert report.run.failed == [other] and report.faults == []
    report.run.failed = []
    allow_refusals(report)
    assert report.faults == ["no request was refused, so the disk's errors met nothing"]


@pytest.fixture
def rewarded(seed: Seed) -> dict[str, float]:
    """A group whose members have their rewards."""
    rewards = {f"t{number}": number / 10 for number in range(GROUP_SIZE)}
    mean = sum(rewards.values()) / GROUP_SIZE
    seed.group("g0", state="scored", size=GROUP_SIZE, rewarded=GROUP_SIZE, reward_mean=mean)
    for name, reward in rewards.items():
        seed.trajectory(name, "g0", reward=reward, state="rewarded")
        seed.feedback(name, reward, state="applied")
    return rewards


def test_rewards_that_are_there_once_are_settled(engine: Engine, rewarded: dict[str, float]) -> None:
    assert unsettled(engine, rewarded) == []


@pytest.mark.parametrize(
    ("table", "values", "fault"),
    [
        (schema.feedback, {"state": "waiting"}, "4 feedback are not applied"),
        (schema.trajectories, {"reward": 0.7}, "have not the reward that was given"),
        (schema.groups, {"rewarded": 5}, "group g0 is ('scored', 4, 5)"),
        (schema.groups, {"reward_mean": 0.9}, "group g0 has the mean 0.9"),
    ],
)
def test_a_reward_that_is_missing_or_counted_twice_is_a_fault(
    engine: Engine, rewarded: dict[str, float], table: Any, values: dict[str, Any], fault: str
) -> None:
    with engine.begin() as connection:
        connection.execute(table.update().values(**values))
    assert any(fault in one for one in unsettled(engine, rewarded))


@pytest.mark.parametrize(
    ("lies", "arrive"),
    [(Lies(), 1), (Lies(lost=1.0), 0), (Lies(twice=1.0), 2)],
    ids=["honest", "lost", "twice"],
)
def test_a_lying_broker_answers_as_if_it_had_delivered(lies: Lies, arrive: int) -> None:
    redis = Redis()
    broker = LyingBroker(redis.folder / "liar.sock", redis.socket, ("judge",), seed=0, lies=lies)
    broker.start()
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(broker.path))
            for command, answer in (
                (b"*3\r\n$5\r\nLPUSH\r\n$5\r\njudge\r\n$2\r\n\r\n\r\n", b":%d\r\n" % arrive),
                (b"*2\r\n$4\r\nLLEN\r\n$5\r\njudge\r\n", b":%d\r\n" % arrive),
                (b"*3\r\n$5\r\nLPUSH\r\n$5\r\nother\r\n$1\r\nx\r\n", b":1\r\n"),
            ):
                client.sendall(command)
                assert client.recv(100) == answer
    finally:
        broker.stop()
        redis.close()
