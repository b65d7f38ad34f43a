"""Each vLLM server brought to what the database says: what is served is loaded, what is over is unloaded.

Two tasks for each: one looks how it is (and at once where a request waits for that), one loads and unloads, which may
take long.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from proxy.background import Background
from proxy.errors import NotReached, UpstreamDown
from proxy.replicas import Replica, Replicas
from proxy.store_replicas import Adapter, Wanted
from proxy.upstream import why
from whetstone.adapters import AdapterDamaged, verify

EVERY_S = 0.5
"""How often a server is looked at, and brought to what the database says."""
SILENT_S = 5.0
"""A server that says nothing for so long is away: one that is merely late has work."""
TELL_EVERY_S = 5.0
"""How often the database is told of a server that has not changed."""
LOAD_TIMEOUT_S = 60.0
FIRST_RETRY_S = 1.0
"""After a load that failed; twice as long each further time."""
LONGEST_RETRY_S = 30.0

log = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)
_sleeping = msgspec.json.Decoder(dict[str, bool])


class Table(Protocol):
    """What the database says, and is told."""

    def wanted(self) -> Wanted:
        """What every server is to have."""
        ...

    def tell_replica(
        self, url: str, state: str, adapters: Sequence[str], reason: str | None, seen_at: datetime | None
    ) -> None:
        """Say how a server is."""
        ...


class Reconciler:
    """Looks after one server. `look` and `reconcile` are turns of two tasks."""

    def __init__(
        self,
        replica: Replica,
        replicas: Replicas,
        table: Table,
        policies: Sequence[str],
        drain_s: float,
        shares_device: bool,
    ) -> None:
        """`policies`: those that vLLM serves; other names on the server are none of ours."""
        self._replica = replica
        self._replicas = replicas
        self._table = table
        self._base_names = frozenset(f"{policy}@v0" for policy in policies)
        self._policies = frozenset(policies)
        self._drain_s = drain_s
        self._shares_device = shares_device
        self._heard_s = time.monotonic()
        self._seen_at: datetime | None = None
        self._wanted: Wanted | None = None
        """As the database last told; None until it has."""
        self._failed: dict[str, _Failure] = {}
        self._over_since: dict[str, float] = {}
        """When a loaded adapter was first found to be over, monotonic seconds."""
        self._told: tuple[object, ...] = ()
        self._told_s = 0.0

    def start(self, background: Background) -> list["asyncio.Task[None]"]:
        """Look how the server is, load and unload, until the tasks are cancelled."""
        replica = self._replica
        return [
            background.every(EVERY_S, f"watch of {replica.url}", self.look, replica.look_now),
            background.every(EVERY_S, f"adapters of {replica.url}", self.reconcile, replica.bring_now),
        ]

    async def look(self) -> None:
        """See whether the server is well, and what it serves."""
        had = self._replica.names
        try:
            asleep, models = await self._sleeps(), await self._models()
        except _Unwell as unwell:
            self._found(healthy=False, reason=str(unwell))
        except NotReached as down:
            self._found(healthy=False, reason=why(down))
        except UpstreamDown as late:
            if time.monotonic() - self._heard_s > SILENT_S:
                self._found(healthy=False, reason=why(late))
        else:
            self._heard_s, self._seen_at = time.monotonic(), datetime.now(UTC)
            told = [model.max_model_len for model in models.data if model.max_model_len is not None]
            self._replica.max_model_len = min(told) if told else self._replica.max_model_len
            names, now = frozenset(model.id for model in models.data), self._replica.names
            # What was loaded or lost while it looked, it may not have heard of.
            self._found(healthy=True, asleep=asleep, names=(names | (now - had)) - (had - now))

    def _found(
        self, *, healthy: bool, reason: str | None = None, asleep: bool = False, names: frozenset[str] | None = None
    ) -> None:
        """Take what a look has found, and tell those who wait if it is new: to them, who may have found otherwise
        while it looked."""
        replica = self._replica
        before = (replica.healthy, replica.asleep, replica.names)
        replica.healthy, replica.asleep, replica.why_away = healthy, asleep, reason
        replica.names = replica.names if names is None else names
        if before != (replica.healthy, replica.asleep, replica.names):
            self._replicas.changed()
            replica.bring_now.set()

    async def reconcile(self) -> None:
        """Load what is missing, unload what is over, tell the database."""
        replica = self._replica
        # In this order: what another proxy or a worker loads after the first look was wanted before.
        loaded = replica.names
        try:
            self._wanted, known = await asyncio.to_thread(self._table.wanted), True
        except SQLAlchemyError as error:  # a server that comes back meanwhile gets what was wanted last
            log.debug("what is to be loaded cannot be read: %s", error)
            known = False
        if self._wanted is None:
            return
        try:
            await self._change(self._wanted, loaded if known else frozenset())
        except UpstreamDown:
            replica.look_now.set()
        before = replica.state, replica.reason
        replica.missing, replica.refused = self._missing(self._wanted), frozenset(self._failed)
        if before != (replica.state, replica.reason):
            log.info("vLLM at %s: %s%s", replica.url, replica.state, f" ({replica.reason})" if replica.reason else "")
        await self._tell()

    async def _change(self, wanted: Wanted, loaded: frozenset[str]) -> None:
        # In this order: loading may take long, and what was over before may be wanted again after it.
        if self._may_change():
            await self._unload(wanted, loaded)
        if self._may_change() and self._is_ours_at_all():
            await self._load_missing(wanted)

    def _may_change(self) -> bool:
        """Whether it can load and unload: while a step has its accelerator, nothing may touch that."""
        return self._replica.healthy and not self._replica.asleep and self._replicas.held_by is None

    def _missing(self, wanted: Wanted) -> dict[str, str]:
        names = self._replica.names
        missing = dict.fromkeys(self._base_names - names, "not among its names; does it serve another model?")
        if not self._is_ours_at_all():
            return missing
        lacking = [name for name in wanted.adapters if self._is_ours(name) and name not in names]
        return missing | {
            name: failed.why if (failed := self._failed.get(name)) else "is being loaded" for name in lacking
        }

    def _is_ours_at_all(self) -> bool:
        """Whether it serves our base model: adapters of another one are none for it."""
        return bool(self._base_names & self._replica.names)

    async def _sleeps(self) -> bool:
        """Whether it sleeps. One that sleeps though no step has the accelerator is woken."""
        if not self._shares_device:
            return False
        status, told = await self._replica.upstream.control("GET", "/is_sleeping")
        try:
            asleep = status == 200 and _sleeping.decode(told).get("is_sleeping", False)
        except msgspec.DecodeError:
            asleep = False
        if not asleep or self._replicas.held_by is not None:
            return asleep
        with self._replica.busy():
            status, told = await self._replica.upstream.control("POST", "/wake_up", {}, LOAD_TIMEOUT_S)
        log.warning("vLLM at %s slept though no step has the accelerator, woken: %d", self._replica.url, status)
        return status != 200

    async def _models(self) -> _Models:
        """What it serves.

        Raises:
            _Unwell: it says that it is not well, or nothing that can be read.
            UpstreamDown: it does not answer.
        """
        status, _ = await self._replica.upstream.control("GET", "/health")
        if status != 200:
            raise _Unwell(f"its health check answers {status}")
        status, told = await self._replica.upstream.control("GET", "/v1/models")
        try:
            if status == 200:
                return _models.decode(told)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise _Unwell(f"it lists no models ({status})")

    async def _load_missing(self, wanted: Wanted) -> None:
        self._failed = {name: failed for name, failed in self._failed.items() if name in wanted.adapters}
        for name, adapter in wanted.adapters.items():
            if not self._is_ours(name):
                continue
            failed = self._failed.get(name)
            if name in self._replica.names:
                self._failed.pop(name, None)
            elif failed is None or time.monotonic() >= failed.again_s:
                await self._load(name, adapter)

    async def _load(self, name: str, adapter: Adapter) -> None:
        """Load one; note why it cannot be.

        Raises:
            UpstreamDown: the server does not answer.
        """
        replica = self._replica
        try:
            await asyncio.to_thread(_verify, adapter)
            if not self._may_change():
                return
            with replica.busy():
                body = {"lora_name": name, "lora_path": str(adapter.folder)}
                path = "/v1/load_lora_adapter"
                status, told = await replica.upstream.control("POST", path, body, LOAD_TIMEOUT_S)
            # Two may do this at once: the second finds the name taken, which is as good.
            if status != 200 and name not in {model.id for model in (await self._models()).data}:
                raise _Unwell(f"vLLM refused it: {status} {told[:300].decode('utf-8', 'replace')}")
        except (AdapterDamaged, _Unwell) as error:
            tries = self._failed[name].tries + 1 if name in self._failed else 1
            self._failed[name] = _Failure(str(error), tries, time.monotonic() + retry_after_s(tries))
            return
        self._failed.pop(name, None)
        replica.names |= {name}
        self._replicas.changed()
        log.info("loaded %s into vLLM at %s", name, replica.url)

    async def _unload(self, wanted: Wanted, loaded: frozenset[str]) -> None:
        """Unload what has been over for as long as its last requests may take to begin; `loaded`: before it was read
        what is wanted."""
        replica, now_s = self._replica, time.monotonic()
        over = {name for name in loaded & replica.names if self._is_ours(name) and name not in wanted.kept}
        self._over_since = {name: self._over_since.get(name, now_s) for name in over}
        for name, since_s in self._over_since.items():
            if now_s - since_s < self._drain_s or replica.using.get(name):
                continue
            replica.names -= {name}
            body = {"lora_name": name}
            status, told = await replica.upstream.control("POST", "/v1/unload_lora_adapter", body)
            if status == 200:
                log.info("unloaded %s from vLLM at %s", name, replica.url)
            else:
                log.warning("%s: %s was not unloaded: %d %r", replica.url, name, status, told[:300])

    def _is_ours(self, name: str) -> bool:
        policy, _, version = name.rpartition("@v")
        return policy in self._policies and version != "0"

    async def _tell(self) -> None:
        """Tell the database of a change, and from time to time that there is none."""
        replica = self._replica
        adapters = sorted(name for name in replica.names if "@v" in name and not name.endswith("@v0"))
        told = (replica.state, adapters, replica.reason)
        if told == self._told and time.monotonic() - self._told_s < TELL_EVERY_S:
            return
        await asyncio.to_thread(
            self._table.tell_replica, replica.url, replica.state, adapters, replica.reason, self._seen_at
        )
        self._told, self._told_s = told, time.monotonic()


class _Failure(msgspec.Struct, frozen=True):
    why: str
    tries: int
    again_s: float
    """Not before this, monotonic seconds."""


class _Unwell(Exception):
    """The server answered that it cannot."""


def retry_after_s(tries: int) -> float:
    """How long until what has failed so often is tried again."""
    return float(min(FIRST_RETRY_S * 2 ** (tries - 1), LONGEST_RETRY_S))


def _verify(adapter: Adapter) -> None:
    """Check the files.

    Raises:
        AdapterDamaged: they are not what was written.
    """
    manifest_sha256 = verify(adapter.folder)
    if adapter.manifest_sha256 not in (None, manifest_sha256):
        raise AdapterDamaged(f"{adapter.folder}: its manifest is not the one that the database has noted")
