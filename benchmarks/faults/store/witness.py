"""Watch a run with an adapter store from outside, by a connection of its own that has no faults.

It checks all the time that whatever the store shows as published is complete, and that a server has what is live.
"""

import contextlib
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, select

from migrations import schema
from whetstone.domain.ids import version_id
from whetstone.registry.adapters import CONFIG, MANIFEST, WEIGHTS, AdapterDamaged, NotPublished
from whetstone.registry.remote.cache import pull
from whetstone.registry.remote.object_store import ObjectStore
from whetstone.vllm.client import Vllm, VllmError

PUBLISHED = frozenset({MANIFEST, WEIGHTS, CONFIG})
LOOK_EVERY_S = 0.1

v, p = schema.policy_versions.c, schema.policies.c


class Witness:
    """What was seen, and what should not have been."""

    def __init__(self, store: ObjectStore, engine: Engine, vllm: Vllm) -> None:
        self._store = store
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._vllm = vllm
        self.faults: list[str] = []
        self.looks = 0
        self.most = 0
        """Most adapters that the store had at once."""
        self.whole: set[str] = set()
        """Adapters that were seen with a manifest, and pulled and verified."""
        self.unfinished: set[str] = set()
        """Adapters that were seen without one."""
        self.live: dict[int, bool] = {}
        """Version that was seen live -> whether the server had it then."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again in a thread."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_EVERY_S):
                try:
                    self.look()
                except Exception as error:  # the run must end, and say so
                    self.faults.append(f"the witness failed: {error!r}")
                    return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def look(self) -> None:
        """Check the store, and then the live version."""
        self.looks += 1
        objects = self._store.objects()
        self.most = max(self.most, len(objects))
        for sha256, names in objects.items():
            if strange := names.keys() - PUBLISHED:
                self.faults.append(f"the store has {', '.join(sorted(strange))} of {sha256}")
            if MANIFEST not in names:
                self.unfinished.add(sha256)
            elif sha256 not in self.whole:
                self._pull(sha256)
        self._check_live()

    def _pull(self, sha256: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                pull(self._store, sha256, Path(folder) / sha256)
                self.whole.add(sha256)
            except (NotPublished, AdapterDamaged) as error:
                # Retention may have begun to delete it meanwhile: then its manifest was first.
                if MANIFEST in self._store.objects().get(sha256, {}):
                    self.faults.append(f"half published: {error}")

    def _check_live(self) -> None:
        query = select(p.id, p.live_version, v.manifest_sha256).where(
            v.policy == p.id, v.project == p.project, v.version == p.live_version
        )
        with self._reader.connect() as connection:
            policy, live, sha256 = connection.execute(query).one()
        if live in self.live:
            return
        try:
            self.live[live] = version_id(policy, live) in self._vllm.models()
        except VllmError as error:
            self.faults.append(f"the server does not answer: {error}")
            return
        if not self.live[live]:
            self.faults.append(f"version {live} is live, and the server does not have it")
        if live > 0:
            try:
                self._store.check(sha256)
            except (NotPublished, AdapterDamaged) as error:
                self.faults.append(f"version {live} is live, and a server that starts now cannot load it: {error}")


def hashes(engine: Engine) -> tuple[Counter[str], set[str]]:
    """Return how many versions are in each state, and the hashes of those that are not removed."""
    with engine.connect() as connection:
        rows = connection.execute(select(v.state, v.manifest_sha256, v.removed_at).where(v.version > 0)).all()
    states = Counter("removed" if row.removed_at is not None else row.state for row in rows)
    return states, {row.manifest_sha256 for row in rows if row.removed_at is None}
