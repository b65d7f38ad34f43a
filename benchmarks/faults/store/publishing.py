"""The same check without a learner: versions of random bytes are published by processes that are killed at random.

It takes a minute where the whole one takes ten. Publishing, pulling, the ledger of versions and retention are the real
ones; the server only verifies what it loads. A killed attempt is repeated as a step is: with other bytes, under
another number.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine

from benchmarks.faults.store.witness import Witness, hashes
from migrations import schema
from trainer.adapters.files import write
from trainer.adapters.published import UNRECORDED_S, sweep_published
from trainer.adapters.retention import Sweeper
from trainer.domain.base import BaseModel
from trainer.store.retention import ManifestStore, RetentionStore
from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id
from whetstone.registry.adapters import CONFIG, OPTIMIZER_STATE, WEIGHTS, StoreError, verify
from whetstone.registry.remote.cache import AdapterCache
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.registry.remote.puller import running
from whetstone.registry.remote.sources import Pullers
from whetstone.registry.versions import live_version, lock, make_live
from whetstone.vllm.client import Vllm

WEIGHTS_BYTES = 300_000
KILLED_SHARE = 0.5
"""Of the attempts to publish."""
KILLED_AFTER_S = 1.5
RETRY_S = 0.2
HANGS_S = 120.0
"""A process that publishes for so long is killed as well."""

T = TypeVar("T")


class RandomAdapter:
    """An adapter's files, of random bytes."""

    base = BaseModel("random", "c" * 64, "w" * 64, None)

    def __init__(self, rng: random.Random) -> None:
        self._content = {
            WEIGHTS: rng.randbytes(WEIGHTS_BYTES),
            CONFIG: b"{}",
            OPTIMIZER_STATE: rng.randbytes(2 * WEIGHTS_BYTES),
            "rng.safetensors": b"state",
        }

    def files(self) -> Mapping[str, bytes]:
        """File name -> contents."""
        return self._content


class VerifyingServer(Vllm):
    """A server that verifies the folder of each adapter that it loads."""

    def __init__(self, base_name: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.names = {base_name}

    def models(self) -> set[str]:
        return set(self.names)

    def load(self, name: str, folder: Path) -> None:
        verify(folder)
        self.names.add(name)


class Publishing:
    """A trainer's machine, a server's machine with a puller, and a faulty store between them."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        store: Callable[[], ObjectStore],
        direct: ObjectStore,
        rng: random.Random,
    ) -> None:
        """`store` opens the store by faulty connections, in each process for itself; `direct` has none."""
        self._settings = settings
        self._engine = engine
        self._store = store
        self._direct = direct
        self._rng = rng
        self._next = 1
        self.server = VerifyingServer(settings.served_name)
        self.witness = Witness(direct, engine, self.server)
        self.kills = 0
        self.failures: list[str] = []
        """Why the puller could not pull, each time."""
        self.unrecorded = 0
        """Adapters of killed attempts that the store had at the end."""

    def run(self, versions: int, data: Path) -> list[str]:
        """Publish so many versions, and make each live. Return the faults."""
        own = self._store()
        manifests = ManifestStore(self._engine)
        sweeper = Sweeper(RetentionStore(self._engine, self._settings.project), self._settings)
        cache = AdapterCache(data / "pulled", own)
        with running(cache) as puller, self.witness.watching():
            source = Pullers(puller.port)
            for _ in range(versions):
                version, folder = self._publish()
                sha256 = self._record(version, folder)
                name = version_id(self._settings.policy, version)
                self.server.load(name, self._retry(partial(source.locate, "http://127.0.0.1:1", folder, sha256)))
                self._go_live(version)
                sweeper.written()
                sweeper.go_on(datetime.now(UTC))
                with contextlib.suppress(StoreError):
                    sweep_published(manifests, own, datetime.now(UTC))
        faults = list(self.witness.faults)
        sweep_published(manifests, self._direct, datetime.now(UTC))
        if stale := manifests.recorded(self._direct.objects()) - hashes(self._engine)[1]:
            faults.append(f"retention left {len(stale)} adapters of removed versions in the store")
        self.unrecorded = len(self._direct.objects().keys() - hashes(self._engine)[1])
        sweep_published(manifests, self._direct, datetime.now(UTC) + timedelta(seconds=2 * UNRECORDED_S))
        if set(self._direct.objects()) != hashes(self._engine)[1]:
            faults.append("the store differs from what the database has")
        pulled = [folder for folder in (data / "pulled").iterdir() if not folder.name.startswith(".")]
        wrong = [folder for folder in pulled if verify(folder) != folder.name]
        return [*faults, *(f"{folder} is another adapter than its name says" for folder in wrong)]

    def _publish(self) -> tuple[int, Path]:
        """Write and publish the next version, in attempts that may be killed. Return its number and folder."""
        while True:
            version, self._next = self._next, self._next + 1
            folder = self._settings.data / "adapters" / version_id(self._settings.policy, version)
            write(folder, RandomAdapter(self._rng), parent=0, step=version, in_bf16=lambda weights: weights[::2])
            if self._published(folder):
                return version, folder
            self.kills += 1

    def _published(self, folder: Path) -> bool:
        """Publish in a process of its own; return whether it came to its end."""
        kill_after_s = self._rng.uniform(0, KILLED_AFTER_S) if self._rng.random() < KILLED_SHARE else None
        process = os.fork()
        if process == 0:
            try:
                store = self._store()
                self._retry(lambda: store.publish(folder))
                os._exit(0)
            except BaseException:
                os._exit(1)
        deadline = time.monotonic() + (HANGS_S if kill_after_s is None else kill_after_s)
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return status == 0
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return False
            time.sleep(0.01)

    def _retry(self, ask: Callable[[], T]) -> T:
        while True:
            try:
                return ask()
            except StoreError as error:
                self.failures.append(str(error))
                time.sleep(RETRY_S)

    def _record(self, version: int, folder: Path) -> str:
        """Write the version's row, as a step does."""
        sha256 = verify(folder)
        project, policy = self._settings.project, self._settings.policy
        with self._engine.begin() as connection:
            connection.execute(
                schema.policy_versions.insert().values(
                    project=project,
                    id=version_id(policy, version),
                    policy=policy,
                    version=version,
                    parent=live_version(connection, project, policy),
                    state="candidate",
                    served=True,
                    adapter_path=str(folder),
                    manifest_sha256=sha256,
                    created_at=datetime.now(UTC),
                )
            )
        return sha256

    def _go_live(self, version: int) -> None:
        project, policy, rules = self._settings.project, self._settings.policy, self._settings.trainer
        with self._engine.begin() as connection:
            lock(connection, project, policy)
            make_live(connection, project, policy, version, rules.keep_served, datetime.now(UTC))
