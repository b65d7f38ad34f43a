"""`whetstone tail`: each call once, soon after it is recorded; filters; how it ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from tests.conftest import NOW, Seed
from tests.unit.whetstone.cli.commands.test_trajectories import Here, here
from whetstone.calls.store import Filter
from whetstone.cli.commands.tail import LONG, LONG_EVERY, SHORT, Follower
from whetstone.database.engine import snapshots

__all__ = ["here"]


@pytest.fixture
def follower(engine: Any) -> Iterator[Follower]:
    with snapshots(engine.url.render_as_string(hide_password=False)) as snapshot:
        yield Follower(snapshot, Filter("default"))


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["completion_id"] for row in rows]


def test_it_begins_with_the_last_calls_and_goes_on_with_each_new_call_once(seed: Seed, follower: Follower) -> None:
    seed.trajectory("t", turns=3)
    assert ids(follower.begin(2, NOW)) == ["t-1", "t-2"]
    assert follower.new(NOW) == []
    seed.completion("t", 3)
    seed.completion("t", 4)
    assert ids(follower.new(NOW + timedelta(seconds=5))) == ["t-3", "t-4"]
    assert follower.new(NOW + timedelta(seconds=6)) == []


def test_a_call_that_took_long_comes_with_a_later_look(seed: Seed, follower: Follower) -> None:
    seed.trajectory("t", turns=0)
    assert follower.begin(10, NOW) == []
    for turn, took in enumerate((2 * SHORT, 2 * LONG)):
        seed.completion("t", turn, created_at=NOW - took, total_ms=1000 * took.total_seconds())
    shown = [call for _ in range(3 * LONG_EVERY) for call in ids(follower.new(NOW))]
    assert shown == ["t-0"]


def test_a_call_that_two_kinds_of_looks_list_comes_once(seed: Seed, follower: Follower) -> None:
    seed.trajectory("t", turns=0)
    assert follower.begin(10, NOW) == []
    seed.completion("t", 0, created_at=NOW, total_ms=1000 * SHORT.total_seconds())
    seed.completion("t", 1, created_at=NOW)
    looks = [ids(follower.new(NOW + timedelta(seconds=second))) for second in range(4 * LONG_EVERY)]
    assert looks[0] == ["t-0", "t-1"] and not any(looks[1:])


@pytest.mark.parametrize(
    ("wanted", "matching"),
    [
        ({"policy": "starter"}, ["a-0", "b-0"]),
        ({"status": "error"}, ["b-0"]),
        ({"task": "x"}, ["a-0"]),
        ({"task": "x", "status": "error"}, []),
        ({"policy": "other"}, []),
    ],
    ids=str,
)
def test_filters_apply_to_the_first_calls_and_to_new_calls(
    engine: Any, seed: Seed, wanted: dict[str, str], matching: list[str]
) -> None:
    with snapshots(engine.url.render_as_string(hide_password=False)) as snapshot:
        live = Follower(snapshot, Filter("default", **wanted))
        assert live.begin(10, NOW) == []
        seed.trajectory("a", task="x")
        seed.trajectory("b", turns=0)
        seed.completion("b", 0, status="error")
        assert ids(live.new(NOW)) == matching
        assert ids(Follower(snapshot, Filter("default", **wanted)).begin(10, NOW)) == matching


def test_calls_of_other_projects_are_not_shown(seed: Seed, follower: Follower) -> None:
    seed.project("elsewhere")
    seed.trajectory("t", project="elsewhere")
    assert follower.begin(10, NOW) == [] and follower.new(NOW) == []


@pytest.fixture
def following(here: Here) -> Iterator["subprocess.Popen[str]"]:
    here.seed.trajectory("before", task="x")
    arguments = ["tail", "-n", "1", "--json", "--data", str(here.data)]
    command = [sys.executable, "-u", "-m", "whetstone.cli.main", *arguments]
    # A test run in the background ignores SIGINT, and what it starts would, too.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heeds, **pipes) as process:  # noqa: PLW1509
        yield process
        process.kill()


@pytest.mark.slow
def test_it_follows_until_ctrl_c_and_then_ends_quietly(here: Here, following: "subprocess.Popen[str]") -> None:
    assert following.stdout is not None and following.stderr is not None
    first = json.loads(following.stdout.readline())
    assert (first["completion_id"], first["task"], first["prompt"]) == ("before-0", "x", "question 0")
    here.seed.trajectory("after", turns=0)
    here.seed.completion("after", 0, created_at=datetime.now(UTC), ttft_ms=5.0)
    second = json.loads(following.stdout.readline())
    assert (second["completion_id"], second["ttft_ms"], second["status"]) == ("after-0", 5.0, "complete")
    following.send_signal(signal.SIGINT)
    assert (following.wait(30), following.stderr.read()) == (0, "")


@pytest.mark.slow
def test_it_ends_quietly_when_its_reader_has_gone_though_no_call_comes(following: "subprocess.Popen[str]") -> None:
    assert following.stdout is not None and following.stderr is not None
    following.stdout.readline()
    following.stdout.close()
    began_s = time.monotonic()
    assert (following.wait(30), following.stderr.read()) == (0, "")
    assert time.monotonic() - began_s < 20
