"""Check that an adapter store which is slow, silent and cut at random leaves nothing half published, nothing half live.

The trainer's own worker takes steps on a frozen database of scored groups (see `killed`) and publishes each version to
a server of S3's API (moto); a puller, a proxy and a model server on vLLM's wire run as in production. Trainer and
puller reach the store by a relay that forwards, delays, stops and resets their connections at random. The worker is
killed while it publishes, the puller at random moments. A witness with a connection of its own looks at the store
all the time.

Exit 0 only if every version that was live had been loaded by the server and could be pulled, whatever the store showed
with a manifest was complete, and at the end it has exactly what retention has left. Needs s3fs and moto[server].
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.faults.killed.__main__ import LOOK_EVERY_S, Kill, Run, settings_of
from benchmarks.faults.killed.records import GROUPS_PER_STEP, freeze
from benchmarks.faults.store.publishing import Publishing
from benchmarks.faults.store.relay import FaultyRelay, at_random
from benchmarks.faults.store.witness import PUBLISHED, Witness, hashes
from benchmarks.kit.check import counted, figures_table, verdict
from benchmarks.kit.harness import opened, prepared, present
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import (
    PROGRAM,
    ROOT,
    answers,
    await_true,
    running_adapter_vllm,
    running_broker,
    running_proxy,
)
from migrations.run import upgrade
from trainer.adapters.published import UNRECORDED_S, sweep_published
from trainer.learner.learner import Learner
from trainer.store.retention import ManifestStore
from whetstone.config.settings import Settings, as_environment
from whetstone.database.engine import connect
from whetstone.registry.adapters import TEMPORARY, AdapterDamaged, StoreError, verify
from whetstone.registry.projects import Store
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.registry.remote.sources import cache_folder
from whetstone.stack.stack import free_ports
from whetstone.vllm.client import Vllm

BUCKET, PREFIX = "whetstone", "adapters"
LOGIN = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
TIMEOUT_S, LEASE_S = 3.0, 12.0
PUBLISHING_S = 2.0
"""Window of a kill while a version is published by slow connections."""
ENOUGH_KILLS = 5
"""Of so many one meets a version that is being published; on a busy machine half of them come after it."""
PULLER_LIVES_S = (10.0, 60.0)
START_S, SWEPT_S, STILL_S = 300.0, 300.0, 2400.0


@contextlib.contextmanager
def running_store(log: Path) -> Iterator[int]:
    """Run moto's S3 with an empty bucket; yield its port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(port)]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out) as process:
        try:
            await_true(partial(answers, f"http://127.0.0.1:{port}/moto-api/data.json"), "the store answers", START_S)
            httpx.put(f"http://127.0.0.1:{port}/{BUCKET}", timeout=START_S, trust_env=False).raise_for_status()
            yield port
        finally:
            process.kill()


class PullerProcess:
    """A `whetstone puller` that is killed and started again."""

    def __init__(self, settings: Settings, log: Path, rng: random.Random) -> None:
        self._settings, self._log, self._rng = settings, log, rng
        self._health = f"http://127.0.0.1:{settings.adapters.puller_port}/health"
        self.kills = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run it, and kill it at random moments."""
        ended = threading.Event()
        thread = threading.Thread(target=self._live, args=(ended,), daemon=True)
        thread.start()
        try:
            await_true(partial(answers, self._health), "the puller answers", START_S)
            yield
        finally:
            ended.set()
            thread.join()

    def _live(self, ended: threading.Event) -> None:
        command = [sys.executable, "-c", PROGRAM, "puller", "--host", "127.0.0.1"]
        environment = {**os.environ, **as_environment(self._settings)}
        with self._log.open("ab") as log:
            while not ended.is_set():
                with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process:
                    while not ended.wait(0.1) and not answers(self._health):
                        pass
                    ended.wait(self._rng.uniform(*PULLER_LIVES_S))
                    os.kill(process.pid, signal.SIGKILL)
                self.kills += not ended.is_set()


def _faulty_store(stack: contextlib.ExitStack, data: Path) -> tuple[int, FaultyRelay]:
    """Start a store, and what stands before it, until the stack ends; name it to this process and those it starts.

    Return the store's port and the relay.
    """
    store_port = stack.enter_context(running_store(data / "store.log"))
    relay = FaultyRelay(store_port)
    stack.callback(relay.close)
    # s3fs reads it.
    os.environ.update(LOGIN, AWS_ENDPOINT_URL=f"http://127.0.0.1:{relay.port}")
    return store_port, relay


def prove(data: Path, steps: int, kills: int, seed: int, console: Console) -> tuple[dict[str, str], list[str]]:
    """Make the run. Return its figures, and what does not hold."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        store_port, relay = _faulty_store(stack, data)
        settings = _settings(data, seed)
        template = data / "frozen.db"
        _freeze(template, settings, steps)
        url = stack.enter_context(running_adapter_vllm(settings))
        vllm = settings.vllm.model_copy(update={"urls": (url,)})
        broker = stack.enter_context(running_broker())
        settings = settings.model_copy(update={"data": data / "trainer", "broker": broker, "vllm": vllm})
        settings.data.mkdir()
        shutil.copyfile(template, settings.data / "whetstone.db")
        engine = connect(settings.database_url)
        stack.callback(engine.dispose)
        Store(engine).prepare(settings)
        direct = _direct(settings, store_port)
        witness = Witness(direct, engine, Vllm(url))
        # Nothing of the trainer's folder is at the server's: the proxy and the puller have data folders of their own.
        elsewhere = {"database": settings.database_url}
        puller = PullerProcess(settings.model_copy(update={"data": data / "server"}), data / "puller.log", rng)
        stack.enter_context(puller.running())
        front = settings.model_copy(update={"data": data / "proxy", **elsewhere})
        front.data.mkdir()
        stack.enter_context(running_proxy(front, data / "proxy.log"))
        seconds = stack.enter_context(at_random(relay, rng))
        run = Run(settings, engine, STILL_S)
        taken: list[Kill] = []
        began = time.monotonic()
        with witness.watching():
            for _ in range(kills):
                if kill := _kill(run, relay, rng.uniform(0, PUBLISHING_S)):
                    taken.append(kill)
                    console.print(f"kill {len(taken):2}: {kill}", highlight=False)
            _to_its_end(run)
            took_s = time.monotonic() - began
            stale = _await_swept(run, direct, engine)
        orphans = set(direct.objects()) - hashes(engine)[1]
        later = datetime.now(UTC) + timedelta(seconds=2 * UNRECORDED_S)
        sweep_published(ManifestStore(engine), direct, later)
        states, standing = hashes(engine)
        cached = _cached(puller, settings, data)
        figures = {
            "steps, versions": f"{run.look().number}, {counted(states)}",
            "seconds, and by state of the connections": f"{took_s:.0f}; {_rounded(seconds)}; {relay.cuts} resets",
            "kills of the worker": counted(Counter(kill.met for kill in taken)),
            "kills of the puller": str(puller.kills),
            "looks of the witness": str(witness.looks),
            "adapters that were seen complete": str(len(witness.whole)),
            "seen without a manifest at some moment": str(len(witness.unfinished)),
            "versions that were seen live, and loaded": f"{len(witness.live)}, {sum(witness.live.values())}",
            "adapters in the store: most, at the end, of killed attempts": (
                f"{witness.most}, {len(standing)}, {len(orphans)}"
            ),
        }
        return figures, [
            *witness.faults,
            *cached,
            *_loadable(direct, standing),
            *present(
                {
                    f"only {run.look().number} steps of {steps}": run.look().number < steps,
                    f"steps that made no live version: {counted(states)}": states["rejected"] > 0,
                    f"retention left {len(stale)} adapters of removed versions in the store": stale,
                    "the store differs from what the database has": set(direct.objects()) != standing,
                    "retention removed nothing: see trainer.keep_adapters": not states["removed"],
                    "no kill met a version that was being published": kills >= ENOUGH_KILLS
                    and not any(kill.met == "written, not reported" for kill in taken),
                }
            ),
        ]


def publish_alone(data: Path, versions: int, seed: int) -> tuple[dict[str, str], list[str]]:
    """Make the run without a learner. Return its figures, and what does not hold."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        store_port, relay = _faulty_store(stack, data)
        settings = _settings(data, seed)
        engine = stack.enter_context(prepared(settings))
        seconds = stack.enter_context(at_random(relay, rng))

        def faulty() -> ObjectStore:
            return ObjectStore(settings.adapters.store, TIMEOUT_S)

        run = Publishing(settings, engine, faulty, _direct(settings, store_port), rng)
        began = time.monotonic()
        faults = run.run(versions, data)
        states, standing = hashes(engine)
        witness = run.witness
        return {
            "versions": counted(states),
            "seconds, and by state of the connections": (
                f"{time.monotonic() - began:.0f}; {_rounded(seconds)}; {relay.cuts} resets"
            ),
            "killed while they published": str(run.kills),
            "pulls that failed": str(len(run.failures)),
            "looks of the witness": str(witness.looks),
            "adapters that were seen complete": str(len(witness.whole)),
            "seen without a manifest at some moment": str(len(witness.unfinished)),
            "versions that were seen live, and loaded": f"{len(witness.live)}, {sum(witness.live.values())}",
            "adapters in the store: most, at the end, of killed attempts": (
                f"{witness.most}, {len(standing)}, {run.unrecorded}"
            ),
        }, [
            *faults,
            *present(
                {
                    "no process was killed": run.kills == 0,
                    "nothing was seen half way: the witness looked too seldom": not witness.unfinished,
                    "retention removed nothing": versions > 8 and not states["removed"],
                }
            ),
        ]


def _settings(data: Path, seed: int) -> Settings:
    (port,) = free_ports(1)
    settings = settings_of(data, seed)
    trainer = {"keep_adapters": 2, "keep_adapters_s": 0.0, "lease_s": LEASE_S}
    return settings.model_copy(
        update={
            "trainer": settings.trainer.model_copy(update=trainer),
            "proxy": settings.proxy.model_copy(update={"drain_s": 0.5}),
            "adapters": settings.adapters.model_copy(
                update={"store": f"s3://{BUCKET}/{PREFIX}", "puller_port": port, "timeout_s": TIMEOUT_S}
            ),
        }
    )


def _freeze(template: Path, settings: Settings, steps: int) -> None:
    upgrade(f"sqlite:///{template}")
    engine = connect(f"sqlite:///{template}")
    freeze(engine, settings, steps, Learner.fresh(settings.model, settings.trainer, settings.seed).logprobs)
    engine.dispose()


def _direct(settings: Settings, port: int) -> ObjectStore:
    """Return the store by a connection without faults."""
    import s3fs

    filesystem: Any = s3fs.S3FileSystem(
        key="any", secret="any", endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False
    )
    return ObjectStore(settings.adapters.store, 60, filesystem, f"{BUCKET}/{PREFIX}")


def _kill(run: Run, relay: FaultyRelay, after_s: float) -> Kill | None:
    """Start the worker, and kill it so long after it has begun to publish a version; None if all was over before.

    The connections are slow then, so that the kill comes between two objects or within one.
    """
    before, began = run.look(), time.monotonic()
    written = _folders(run)
    with run.worker() as process:
        while _folders(run) == written:
            if not run.look().left:
                return None
            run._check(process, began)
            time.sleep(LOOK_EVERY_S)
            written &= _folders(run)  # retention removes some
        relay.mode = "slow"
        time.sleep(after_s)
        at_s = time.monotonic() - began
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    seen = run.look()
    return Kill("published", at_s, seen, run._met(before, seen))


def _folders(run: Run) -> set[str]:
    """Return the adapters that the worker has written completely."""
    return {path.name for path in (run.settings.data / "adapters").glob("*@v*") if not path.name.startswith(TEMPORARY)}


def _to_its_end(run: Run) -> None:
    """Have the worker take all steps that are left."""
    with run.worker() as process:
        run._await(lambda _: False, process, time.monotonic())


def _await_swept(run: Run, store: ObjectStore, engine: Any) -> set[str]:
    """Have the worker run until its retention has swept the store. Return what is left of removed versions."""
    manifests = ManifestStore(engine)
    deadline = time.monotonic() + SWEPT_S
    with run.worker():
        while True:
            unneeded = set(store.objects()) - hashes(engine)[1]
            if not (stale := manifests.recorded(unneeded)) or time.monotonic() > deadline:
                return stale
            time.sleep(0.5)


def _loadable(store: ObjectStore, standing: set[str]) -> list[str]:
    faults = []
    for sha256 in sorted(standing):
        try:
            store.check(sha256)
        except (AdapterDamaged, StoreError) as error:
            faults.append(f"a version that is not removed cannot be pulled: {error}")
    return faults


def _cached(puller: PullerProcess, settings: Settings, data: Path) -> list[str]:
    """Return what is wrong with the server's cache: each folder with a final name must be complete."""
    faults = []
    for folder in cache_folder(data / "server").iterdir():
        if folder.name.startswith("."):
            continue
        try:
            if verify(folder) != folder.name or {path.name for path in folder.iterdir()} != PUBLISHED:
                faults.append(f"{folder} is another adapter than its name says, or has other files")
        except AdapterDamaged as error:
            faults.append(f"half pulled: {error}")
    return faults


def _rounded(seconds: Counter[str]) -> str:
    return ", ".join(f"{mode} {value:.0f} s" for mode, value in seconds.most_common())


def main() -> int:
    """Run the check."""
    parser = parser_of(
        "Whether a faulty adapter store leaves anything half published or half live.",
        {
            "--steps": {"type": int, "default": 20, "help": f"of {GROUPS_PER_STEP} groups each"},
            "--alone": {"action": "store_true", "help": "without a learner and a proxy: a minute in place of ten"},
            "--kills": {"type": int, "default": 6, "help": "of the training worker while it publishes"},
            "--seed": {"type": int, "default": 0, "help": "of the groups, the faults and the moments of the kills"},
            "--data": {"type": Path, "help": "an empty folder for databases, adapters and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    with opened("store", args.data) as (data, console):
        if args.alone:
            figures, faults = publish_alone(data, args.steps, args.seed)
        else:
            figures, faults = prove(data, args.steps, args.kills, args.seed, console)
    console.print(figures_table(figures))
    return verdict(faults, console, f"{args.steps} versions, nothing half published, nothing half live: it holds")


if __name__ == "__main__":
    sys.exit(main())
