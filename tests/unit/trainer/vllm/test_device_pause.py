"""The accelerator is the step's only once every proxy has stopped, and vLLM's again whatever becomes of the step."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, cast

import pytest
from sqlalchemy import Engine, update

from benchmarks.fakes.json_server import Handler, Server
from migrations import schema
from proxy.upstream.device_pause import Pauses
from proxy.upstream.load_balancer import Replica, Replicas
from proxy.upstream.replica_store import ReplicaTables
from proxy.upstream.server import Upstream
from trainer.errors import DeviceBusy, LeaseLost
from trainer.store.pause import PauseStore
from trainer.vllm.device_pause import Pause
from whetstone.config.settings import Settings
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused

LEASE_S = 60.0


class SleepyVllm(Server):
    """Sleep mode as vLLM speaks it."""

    def __init__(self) -> None:
        self.asleep = False
        self.calls: list[str] = []
        self.can_sleep = True
        self.refuses_to_sleep = False
        self.answers = True
        self.when_asked: Callable[[], object] = lambda: None
        super().__init__(SleepyHandler)


class SleepyHandler(Handler):
    server: SleepyVllm

    def respond(self, body: dict[str, Any]) -> None:
        fake = self.server
        fake.calls.append(self.path)
        fake.when_asked()
        if not fake.answers:
            self.close_connection = True
        elif self.path == "/health":
            self.whole(200, b"")
        elif not fake.can_sleep or (fake.refuses_to_sleep and self.path.startswith("/sleep")):
            self.whole(404, {"detail": "Not Found"})
        elif self.path == "/is_sleeping":
            self.whole(200, {"is_sleeping": fake.asleep})
        else:
            fake.asleep = self.path.startswith("/sleep")
            self.whole(200, {"status": "sleeping" if fake.asleep else "awake"})


class Looks(PauseStore):
    """The tables; before each look at the proxies the next act happens."""

    acts: Iterator[Callable[[], object]] = iter(())
    looks = 0

    def __init__(self, engine: Engine, project: str) -> None:
        super().__init__(engine, project)
        self.renewed_aside = threading.Event()

    def renew(self, pause_id: str, now: datetime, lease_s: float) -> bool:
        lasts = super().renew(pause_id, now, lease_s)
        if threading.current_thread() is not threading.main_thread():
            self.renewed_aside.set()
        return lasts

    def moving(self, pause_id: str, now: datetime) -> dict[str, str]:
        self.looks += 1
        next(self.acts, lambda: None)()
        return super().moving(pause_id, now)


class Shared:
    """A step and a server on one accelerator, and the proxies' rows."""

    def __init__(self, engine: Engine, seed: Any, fake: SleepyVllm) -> None:
        self.engine, self.seed, self.fake = engine, seed, fake
        self.table = Looks(engine, "default")
        self.vllm = Vllm(fake.url)
        self.renewals = 0
        self.pause = self.of({"shares_device": True})

    def of(self, vllm: dict[str, Any], max_wait_s: float = 60.0, lease_s: float = LEASE_S) -> Pause:
        settings = Settings(vllm=vllm, proxy={"max_wait_s": max_wait_s}, trainer={"lease_s": lease_s})
        return Pause(self.table, [self.vllm], settings, "starter#1")

    def renew(self) -> None:
        self.renewals += 1
        self.pause.renew()

    def project(self) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(schema.projects.select()).one()

    def set_project(self, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(schema.projects).values(values))

    def proxy(self, proxy_id: str, seen_at: datetime | None = None, **values: Any) -> None:
        now = datetime.now(UTC)
        row = {"project": "default", "id": proxy_id, "written_until": now, "seen_at": seen_at or now}
        self.seed.insert(schema.proxies, **row, **values)

    def tell(self, proxy_id: str, in_flight: int) -> None:
        """The proxy knows of the pause, and has so many calls on their way."""
        x = schema.proxies.c
        told = {"pause_seen": self.project().pause_id, "in_flight": in_flight}
        with self.engine.begin() as connection:
            connection.execute(update(schema.proxies).where(x.id == proxy_id).values(told))


@pytest.fixture
def fake() -> Iterator[SleepyVllm]:
    with SleepyVllm() as fake:
        yield fake


@pytest.fixture
def shared(engine: Engine, seed: Any, fake: SleepyVllm) -> Iterator[Shared]:
    shared = Shared(engine, seed, fake)
    yield shared
    shared.vllm.close()


def test_vllm_sleeps_while_the_step_has_the_accelerator(shared: Shared) -> None:
    with shared.pause.hold(shared.renew):
        assert shared.fake.asleep
        project = shared.project()
        assert project.pause_id.startswith("starter#1 ")
        assert project.pause_until > datetime.now(UTC) + timedelta(seconds=LEASE_S / 2)
    assert not shared.fake.asleep
    assert shared.fake.calls == ["/is_sleeping", "/sleep?level=1&mode=wait", "/wake_up"]
    assert (shared.project().pause_id, shared.project().pause_until) == (None, None)


def test_an_accelerator_of_its_own_pauses_nothing(shared: Shared) -> None:
    pause = shared.of({})
    with pause.hold(shared.renew):
        pause.renew()
        assert shared.project().pause_id is None
    assert shared.fake.calls == []


def test_it_waits_until_every_proxy_has_noticed_and_its_calls_are_answered(shared: Shared) -> None:
    shared.proxy("a", in_flight=3)
    shared.proxy("b")
    shared.proxy("dead", seen_at=datetime.now(UTC) - timedelta(minutes=1), in_flight=9)
    acts = [
        lambda: None,
        lambda: shared.tell("a", 3),
        lambda: shared.tell("b", 0),
        lambda: shared.tell("a", 1),
        lambda: shared.tell("a", 0),
    ]
    shared.table.acts = iter(acts)
    with shared.pause.hold(shared.renew):
        assert shared.table.looks == len(acts)
        assert shared.fake.asleep


def test_the_proxys_own_word_for_it_is_understood(shared: Shared) -> None:
    """Both sides of the tables, as the programs have them."""
    server = Replica(shared.fake.url, cast(Upstream, None))
    replicas = Replicas([server], max_waiting=1, max_wait_s=1)
    pauses = Pauses(ReplicaTables(shared.engine, "default", ["default"]), replicas, "a", shares_device=True)
    shared.proxy("a")
    answering = server.busy()
    answering.__enter__()
    refresh = lambda: asyncio.run(pauses.refresh())  # noqa: E731
    shared.table.acts = iter([refresh, lambda: answering.__exit__(None, None, None), refresh])
    with shared.pause.hold(shared.renew):
        assert shared.table.looks == 3 and replicas.pause_id == shared.project().pause_id
    refresh()
    assert replicas.pause_id is None


def test_what_a_proxy_saw_of_an_earlier_pause_does_not_count(shared: Shared) -> None:
    shared.proxy("a", pause_seen="starter#1 earlier", in_flight=0)
    shared.table.acts = iter([lambda: None, lambda: shared.tell("a", 0)])
    with shared.pause.hold(shared.renew):
        assert shared.table.looks == 2


def test_calls_that_do_not_end_are_not_waited_for_longer_than_a_request_waits(shared: Shared) -> None:
    shared.proxy("a", in_flight=2)
    shared.table.acts = iter([lambda: shared.tell("a", 2)])
    shared.pause = shared.of({"shares_device": True}, max_wait_s=0)
    with pytest.raises(DeviceBusy, match="within 0 s: proxy a: 2 calls on their way"), shared.pause.hold(shared.renew):
        raise AssertionError("it has the accelerator")
    assert shared.project().pause_id is None and shared.fake.calls == ["/is_sleeping"]


def test_whatever_happens_in_the_step_vllm_is_woken(shared: Shared) -> None:
    with pytest.raises(KeyboardInterrupt), shared.pause.hold(shared.renew):
        raise KeyboardInterrupt
    assert not shared.fake.asleep and shared.project().pause_id is None


def test_one_server_that_cannot_sleep_says_how_it_could_and_the_others_are_woken(shared: Shared) -> None:
    with SleepyVllm() as other:
        other.can_sleep = False
        settings, awake = Settings(vllm={"shares_device": True}), Vllm(other.url)
        pause = Pause(shared.table, [shared.vllm, awake], settings, "starter#1")
        with pytest.raises(DeviceBusy, match="--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"), pause.hold(pause.renew):
            raise AssertionError("it has the accelerator")
        assert (shared.fake.calls, other.calls) == (["/is_sleeping"], ["/is_sleeping"])
        assert shared.table.looks == 0  # no app has waited for that
        other.can_sleep, other.refuses_to_sleep = True, True
        with pytest.raises(DeviceBusy, match="--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"), pause.hold(pause.renew):
            raise AssertionError("it has the accelerator")
        assert shared.fake.calls[2:] == ["/sleep?level=1&mode=wait", "/wake_up"] and not shared.fake.asleep
        assert other.calls[2:] == ["/sleep?level=1&mode=wait"]
        awake.close()
    assert shared.project().pause_id is None


def test_a_server_that_does_not_answer_is_not_trained_beside(shared: Shared) -> None:
    def hang_up() -> None:
        shared.fake.answers = False

    shared.table.acts = iter([hang_up])
    with pytest.raises(DeviceBusy, match="does not go to sleep"), shared.pause.hold(shared.renew):
        raise AssertionError("it has the accelerator")
    assert shared.fake.calls[-1] == "/wake_up"  # it may have heard
    with pytest.raises(DeviceBusy, match="does not answer"), shared.pause.hold(shared.renew):
        raise AssertionError("it has the accelerator")
    assert shared.table.looks == 1
    assert shared.project().pause_id is None


def test_a_server_that_is_not_woken_does_not_keep_the_proxies_waiting(shared: Shared) -> None:
    with shared.pause.hold(shared.renew):
        shared.fake.answers = False
    assert shared.project().pause_id is None


def test_two_steps_do_not_share_it(shared: Shared) -> None:
    with shared.pause.hold(shared.renew):
        other = shared.of({"shares_device": True})
        with pytest.raises(DeviceBusy, match="another step"), other.hold(other.renew):
            raise AssertionError("it has the accelerator")
        assert shared.fake.asleep and shared.project().pause_id is not None


def test_a_pause_whose_step_went_silent_is_over_for_whoever_asks_next(shared: Shared) -> None:
    shared.set_project(pause_id="starter#0 lost", pause_until=datetime.now(UTC) - timedelta(seconds=1))
    with shared.pause.hold(shared.renew):
        assert shared.project().pause_id.startswith("starter#1 ")


def test_renewing_keeps_it_and_a_lapsed_one_is_lost_and_left_to_the_proxies(shared: Shared) -> None:
    with pytest.raises(LeaseLost, match="60 s in silence"), shared.pause.hold(shared.renew):
        shared.set_project(pause_until=datetime.now(UTC) + timedelta(seconds=1))
        shared.pause.renew()
        assert shared.project().pause_until > datetime.now(UTC) + timedelta(seconds=LEASE_S / 2)
        shared.set_project(pause_until=datetime.now(UTC) - timedelta(seconds=1))
        shared.pause.renew()
    assert shared.fake.asleep  # the proxies wake it, or another step that has it by now


def test_a_model_that_takes_longer_to_read_than_a_lease_does_not_lose_the_accelerator(shared: Shared) -> None:
    shared.pause = shared.of({"shares_device": True}, lease_s=3)
    with shared.pause.hold(shared.renew):
        assert shared.table.renewed_aside.wait(30)
        assert "pause" in {thread.name for thread in threading.enumerate()}
    assert "pause" not in {thread.name for thread in threading.enumerate()}
    assert not shared.fake.asleep and shared.project().pause_id is None


def test_the_step_keeps_its_lease_while_it_waits(shared: Shared) -> None:
    shared.proxy("a")
    shared.pause = shared.of({"shares_device": True}, lease_s=3)
    shared.table.acts = repeat(lambda: shared.renewals and shared.tell("a", 0))
    with shared.pause.hold(shared.renew):
        assert shared.table.looks > 2


def test_an_engine_that_sleeps_lives(shared: Shared) -> None:
    shared.vllm.sleep()
    assert shared.vllm.is_sleeping()
    shared.vllm.wake_up()
    assert not shared.vllm.is_sleeping()
    shared.fake.can_sleep = False
    with pytest.raises(VllmRefused):
        shared.vllm.is_sleeping()
    shared.fake.answers = False
    with pytest.raises(VllmDown):
        shared.vllm.wake_up()
