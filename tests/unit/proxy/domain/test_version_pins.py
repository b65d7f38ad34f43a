"""Which version answers whom while versions come and go, through running proxies before a fake vLLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from migrations import schema
from tests.conftest import NOW
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for
from whetstone.config.settings import Settings
from whetstone.registry import versions

HELLO = {"role": "assistant", "content": "Hello"}
"""What the fake vLLM says."""
PROBE = "who would answer somebody new?"
Start = Callable[[Settings], RunningProxy]


class Line:
    """A policy's versions, moved as workers and admins do, while a proxy serves them."""

    def __init__(self, proxy: RunningProxy, fake_vllm: FakeVllm, policy: str = "starter") -> None:
        self.proxy, self.policy = proxy, policy
        self._fake_vllm = fake_vllm

    def add(self, version: int, **values: Any) -> None:
        """A candidate, made from the version before, that vLLM has loaded."""
        name = f"{self.policy}@v{version}"
        self._fake_vllm.adapters[name] = "somewhere"
        row = {"project": "default", "id": name, "policy": self.policy, "version": version, "parent": version - 1}
        with self.proxy.engine.begin() as connection:
            state = {"state": "candidate", "served": True, "created_at": NOW}
            connection.execute(schema.policy_versions.insert().values(**(row | state | values)))

    def try_on_apps(self, version: int, share: float) -> None:
        v = schema.policy_versions.c
        is_it = (v.policy == self.policy, v.version == version)
        with self.proxy.engine.begin() as connection:
            connection.execute(update(schema.policy_versions).where(*is_it).values(canary_share=share))

    def promote(self, version: int, keep_served: int = 2) -> None:
        with self.proxy.engine.begin() as connection:
            versions.make_live(connection, "default", self.policy, version, keep_served, NOW)
        self.until(version)

    def roll_back(self, to: int) -> None:
        with self.proxy.engine.begin() as connection:
            versions.roll_back(connection, "default", self.policy, None, "worse", 2, NOW)
        self.until(to)

    def reject(self, version: int) -> None:
        with self.proxy.engine.begin() as connection:
            versions.reject(connection, "default", self.policy, version, "worse", NOW)
        wait_for(lambda: f"{self.policy}@v{version}" not in names(self.proxy))

    def until(self, version: int, proxy: RunningProxy | None = None) -> None:
        """Return when that proxy gives this version to new trajectories."""
        wait_for(lambda: version_of((proxy or self.proxy).chat(messages=says(PROBE), model=self.policy)) == version)


def names(proxy: RunningProxy) -> list[str]:
    return [model["id"] for model in proxy.client.get("/v1/models").json()["data"]]


def says(*texts: str) -> list[dict[str, str]]:
    """A conversation in which the user said that, each answered but for the last."""
    turns: list[dict[str, str]] = []
    for text in texts:
        turns += [{"role": "user", "content": text}, HELLO]
    return turns[:-1]


def version_of(response: httpx.Response) -> int:
    """The version that answered."""
    assert response.status_code == 200, response.text
    return int(response.headers["x-policy-version"])


@pytest.fixture
def line(proxy: RunningProxy, fake_vllm: FakeVllm) -> Line:
    """With version 1 live."""
    return begun(proxy, fake_vllm)


@pytest.fixture
def plain_line(plain_proxy: RunningProxy, fake_vllm: FakeVllm) -> Line:
    """The same on SQLite only."""
    return begun(plain_proxy, fake_vllm)


def begun(proxy: RunningProxy, fake_vllm: FakeVllm, policy: str = "starter") -> Line:
    line = Line(proxy, fake_vllm, policy)
    line.add(1)
    line.promote(1)
    return line


NAMED = pytest.mark.parametrize("named", [{}, {"X-Trajectory-Id": "t"}], ids=["by content", "by name"])


@NAMED
def test_a_trajectory_stays_on_its_version_over_a_promotion(
    line: Line, fake_vllm: FakeVllm, named: dict[str, str]
) -> None:
    proxy = line.proxy
    assert version_of(proxy.chat(named, messages=says("a"))) == 1
    line.add(2)
    line.promote(2)
    assert version_of(proxy.chat(named, messages=says("a", "b"))) == 1
    assert fake_vllm.requests[-1]["model"] == "starter@v1"
    response = proxy.chat(named, messages=says("a", "b", "c"), stream=True)
    assert version_of(response) == 1
    rows = proxy.recorded(3, trajectory_id=response.headers["x-trajectory-id"])
    assert [row.policy_version for row in rows] == [1, 1, 1]
    assert version_of(proxy.chat(messages=says("another question"))) == 2


@pytest.mark.parametrize(("setting", "value"), [("pin", "live"), ("pin_lifetime_s", 0.5)])
def test_it_goes_on_with_the_live_version_where_it_follows_that_or_its_time_is_over(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start, setting: str, value: Any
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={setting: value}))
    line = begun(proxy, fake_vllm)
    assert version_of(proxy.chat({"X-Trajectory-Id": "t"})) == 1
    line.add(2)
    line.promote(2)
    wait_for(lambda: version_of(proxy.chat({"X-Trajectory-Id": "t"})) == 2)


@NAMED
def test_a_rolled_back_version_is_left_on_the_next_request(line: Line, named: dict[str, str]) -> None:
    proxy = line.proxy
    line.add(2)
    line.promote(2)
    assert version_of(proxy.chat(named, messages=says("a"))) == 2
    line.roll_back(to=1)
    assert version_of(proxy.chat(named, messages=says("a", "b"))) == 1


def test_a_version_that_is_no_longer_served_is_left(plain_line: Line) -> None:
    proxy = plain_line.proxy
    assert version_of(proxy.chat(messages=says("a"))) == 1
    for version in (2, 3):
        plain_line.add(version)
        plain_line.promote(version, keep_served=1)
    assert version_of(proxy.chat(messages=says("a", "b"))) == 3


@NAMED
def test_a_proxy_that_was_restarted_knows_who_spoke(line: Line, start: Start, named: dict[str, str]) -> None:
    assert version_of(line.proxy.chat(named, messages=says("a"))) == 1
    line.add(2)
    line.promote(2)
    line.proxy.stop()
    assert version_of(start(line.proxy.settings).chat(named, messages=says("a", "b"))) == 1


@NAMED
def test_another_proxys_trajectory_stays_on_its_version(line: Line, start: Start, named: dict[str, str]) -> None:
    other = start(line.proxy.settings)
    response = line.proxy.chat(named, messages=says("a"))
    line.proxy.recorded(trajectory_id=response.headers["x-trajectory-id"])
    line.add(2)
    line.promote(2)
    line.until(2, other)
    assert version_of(other.chat(named, messages=says("a", "b"))) == 1


def test_a_fork_is_answered_by_the_version_that_it_left(plain_line: Line) -> None:
    proxy = plain_line.proxy
    proxy.chat(messages=says("a"))
    proxy.chat(messages=says("a", "b"))
    plain_line.add(2)
    plain_line.promote(2)
    fork = proxy.chat(messages=says("a", "something else"))
    assert (fork.headers["x-threaded-by"], version_of(fork)) == ("fork", 1)
    assert version_of(proxy.chat(messages=says("a", "something else", "c"))) == 1


def test_a_conversation_that_goes_on_after_its_end_keeps_its_version_a_name_does_not(plain_line: Line) -> None:
    proxy = plain_line.proxy
    by_content = proxy.chat(messages=says("a"))
    by_name = proxy.chat({"X-Trajectory-Id": "t"}, messages=says("b"))
    for response in (by_content, by_name):
        ended = {"trajectory_id": response.headers["x-trajectory-id"], "reward": 1.0}
        assert proxy.client.post("/v1/feedback", json=ended).status_code == 202
    plain_line.add(2)
    plain_line.promote(2)
    after = proxy.chat(messages=says("a", "and"))
    assert (after.headers["x-threaded-by"], version_of(after)) == ("after", 1)
    assert version_of(proxy.chat({"X-Trajectory-Id": "t"}, messages=says("c"))) == 2


def test_a_choice_is_gone_on_from_by_the_version_that_spoke_it(plain_line: Line) -> None:
    proxy = plain_line.proxy
    trajectory_id = proxy.chat(messages=says("a"), n=3).headers["x-trajectory-id"]
    plain_line.add(2)
    plain_line.promote(2)
    assert version_of(proxy.chat({"X-Trajectory-Id": f"{trajectory_id}.2"}, messages=says("a", "b"))) == 1


def test_a_version_that_is_asked_for_answers_whatever_spoke_before(plain_line: Line) -> None:
    proxy = plain_line.proxy
    assert version_of(proxy.chat(messages=says("a"))) == 1
    assert version_of(proxy.chat(messages=says("a", "b"), model="starter@v0")) == 0
    assert version_of(proxy.chat(messages=says("a", "b", "c"))) == 0
    assert version_of(proxy.chat(messages=says("a", "b", "c", "d"), model="starter@v1")) == 1
    assert proxy.chat(messages=says("a", "b"), model="starter@v2").status_code == 404


def test_each_policy_of_a_trajectory_stays_on_its_own_version(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, vllm={"max_loras": 8}, policies=("second",)))
    named = {"X-Trajectory-Id": "t"}
    first = begun(proxy, fake_vllm)
    assert version_of(proxy.chat(named)) == 1
    second = begun(proxy, fake_vllm, "second")
    first.add(2)
    first.promote(2)
    assert version_of(proxy.chat(named, model="second")) == 1
    second.add(2)
    second.promote(2)
    assert [version_of(proxy.chat(named, model=model)) for model in ("starter", "second", "starter")] == [1, 1, 1]


def test_a_canary_answers_some_new_trajectories_and_they_stay(plain_line: Line) -> None:
    proxy = plain_line.proxy

    def ask(number: int) -> int:
        return version_of(proxy.chat({"X-Trajectory-Id": f"t-{number}"}))

    assert ask(0) == 1
    plain_line.add(2)
    plain_line.try_on_apps(2, 1.0)
    plain_line.until(2)
    assert ask(0) == 1
    assert ask(1) == 2
    plain_line.try_on_apps(2, 0.5)
    plain_line.until(1)
    drawn = [ask(number) for number in range(2, 42)]
    assert set(drawn) == {1, 2}
    assert [ask(number) for number in range(2, 42)] == drawn
    assert ask(1) == 2
    plain_line.reject(2)
    assert [ask(number) for number in range(42)] == [1] * 42


def test_a_canarys_trajectories_stay_when_it_goes_live(plain_line: Line) -> None:
    plain_line.add(2)
    plain_line.try_on_apps(2, 1.0)
    plain_line.until(2)
    assert version_of(plain_line.proxy.chat(messages=says("a"))) == 2
    plain_line.promote(2)
    plain_line.add(3)
    plain_line.promote(3)
    assert version_of(plain_line.proxy.chat(messages=says("a", "b"))) == 2


def test_a_candidate_that_no_canary_tries_is_heard_by_those_who_ask_for_it_only(plain_line: Line) -> None:
    plain_line.add(2)
    wait_for(lambda: "starter@v2" in names(plain_line.proxy))
    assert version_of(plain_line.proxy.chat(messages=says("a"), model="starter@v2")) == 2
    assert version_of(plain_line.proxy.chat(messages=says("a", "b"))) == 1
