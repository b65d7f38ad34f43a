"""Reconcile each vLLM server with the database: load the versions to be served, unload those that are over.

Two tasks run for each server. One checks its health (at once if a request waits for that); the other loads and unloads,
which may take long.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import NotReached, UpstreamDown
from proxy.supervision import Background
from proxy.upstream.chat_rules_probe import probe_chat_rules
from proxy.upstream.load_balancer import Replica, Replicas
from proxy.upstream.replica_store import Adapter, DesiredAdapters, ReplicaTables
from proxy.upstream.server import why
from whetstone.registry.adapters import AdapterDamaged, NotCopied, StoreError
from whetstone.registry.remote.sources import AdapterSource, SharedFolder

EVERY_S = 0.5
"""How often a server is checked and reconciled."""
SILENT_S = 5.0
"""A server that has not answered for so long is away; one that is merely late may be busy."""
REPORT_EVERY_S = 5.0
"""How often an unchanged server is reported to the database."""
LOAD_TIMEOUT_S = 60.0
PULL_WAITS_S = 1.0
"""How long a turn waits for an adapter that comes from a store; a later turn loads it."""
FIRST_RETRY_S = 1.0
"""Wait after the first failed load; it doubles with each further failure."""
LONGEST_RETRY_S = 30.0

_Pulled = Path | AdapterDamaged | NotCopied | StoreError
"""What came of bringing an adapter to a server's machine."""

log = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)
_sleeping = msgspec.json.Decoder(dict[str, bool])


class Reconciler:
    """Reconciles one server. `look` and `reconcile` each run periodically in a task."""

    def __init__(
        self,
        replica: Replica,
        replicas: Replicas,
        table: ReplicaTables,
        policies: Sequence[str],
        drain_s: float,
        shares_device: bool,
        source: AdapterSource | None = None,
    ) -> None:
        """Create the reconciler of a server. `policies`: the policies that vLLM serves; other names on the server are
        ignored. `source`: how adapters come to the server's machine; None: it sees their folders."""
        self._replica = replica
        self._replicas = replicas
        self._table = table
        self._base_names = frozenset(f"{policy}@v0" for policy in policies)
        self._policies = frozenset(policies)
        self._drain_s = drain_s
        self._shares_device = shares_device
        self._source = source or SharedFolder()
        self._pulls: dict[str, asyncio.Task[_Pulled]] = {}
        """Adapters that are being brought to the server's machine, or have been and are not loaded yet."""
        self._answered_s = time.monotonic()
        self._seen_at: datetime | None = None
        self._has_returned = True
        """Whether the server has come up since it was last asked for its chat rules: it may be another one now."""
        self._wanted: DesiredAdapters | None = None
        """The desired state that was read last; None until the first read."""
        self._failed: dict[str, _Failure] = {}
        self._over_since: dict[str, float] = {}
        """When a loaded adapter was first seen to be over, monotonic seconds."""
        self._last_report: tuple[object, ...] = ()
        self._reported_s = 0.0

    def start(self, background: Background) -> list["asyncio.Task[None]"]:
        """Start the two tasks; they run until they are cancelled."""
        replica = self._replica
        return [
            background.every(EVERY_S, f"watch of {replica.url}", self.look, replica.look_now),
            background.every(EVERY_S, f"adapters of {replica.url}", self.reconcile, replica.bring_now),
        ]

    async def look(self) -> None:
        """Check whether the server is healthy, and which names it serves."""
        had = self._replica.names
        try:
            asleep, models = await self._sleeps(), await self._models()
        except _Unwell as unwell:
            self._is_away(str(unwell))
        except NotReached as down:
            self._is_away(why(down))
        except UpstreamDown as late:
            if time.monotonic() - self._answered_s > SILENT_S:
                self._is_away(why(late))
        else:
            self._answered_s, self._seen_at = time.monotonic(), datetime.now(UTC)
            self._replica.max_model_len = min(
                (model.max_model_len for model in models.data if model.max_model_len is not None),
                default=self._replica.max_model_len,
            )
            if self._has_returned and not asleep:
                await self._learn_rules(models)
            names, now = frozenset(model.id for model in models.data), self._replica.names
            # The list may not include what was loaded or unloaded while the check ran.
            self._update(healthy=True, asleep=asleep, names=(names | (now - had)) - (had - now))

    async def _learn_rules(self, models: _Models) -> None:
        """Ask the server how it makes a chat of Anthropic messages. Without an answer the next check asks again."""
        name = next((model.id for model in models.data if model.id in self._base_names), None)
        if name is None:
            return
        try:
            rules = await probe_chat_rules(self._replica.upstream, name)
        except UpstreamDown as down:
            log.debug("vLLM at %s did not say how it makes a chat of messages: %s", self._replica.url, why(down))
            return
        self._replicas.learn_rules(self._replica, rules)
        self._has_returned = False

    def _is_away(self, reason: str) -> None:
        self._has_returned = True
        self._update(healthy=False, reason=reason)

    def _update(
        self, *, healthy: bool, reason: str | None = None, asleep: bool = False, names: frozenset[str] | None = None
    ) -> None:
        """Store the result of a check. If it differs from the stored state, wake the waiting requests.

        The comparison is with the current state, because requests may have changed it while the check ran.
        """
        replica = self._replica
        before = (replica.healthy, replica.asleep, replica.names)
        replica.healthy, replica.asleep, replica.why_away = healthy, asleep, reason
        replica.names = replica.names if names is None else names
        if before != (replica.healthy, replica.asleep, replica.names):
            self._replicas.changed()
            replica.bring_now.set()

    async def reconcile(self) -> None:
        """Load what is missing, unload what is over, report to the database."""
        replica = self._replica
        # Read `names` before the desired state: what another proxy or a worker loads after that was wanted before.
        loaded = replica.names
        try:
            self._wanted = await asyncio.to_thread(self._table.wanted)
        except SQLAlchemyError as error:  # a server that comes back meanwhile gets the last known desired state
            log.debug("what is to be loaded cannot be read: %s", error)
            loaded = frozenset()
        if self._wanted is None:
            return
        try:
            # Unload first: loading may take long, and an adapter that was over before may be wanted again after it.
            if self._may_change():
                await self._unload(self._wanted, loaded)
            if self._may_change() and self._is_ours_at_all():
                await self._load_missing(self._wanted)
        except UpstreamDown:
            replica.look_now.set()
        before = replica.state, replica.reason
        replica.missing, replica.refused = self._missing(self._wanted), frozenset(self._failed)
        if before != (replica.state, replica.reason):
            log.info("vLLM at %s: %s%s", replica.url, replica.state, f" ({replica.reason})" if replica.reason else "")
        await self._report()

    def _may_change(self) -> bool:
        """Return whether the server can load and unload: while a step has its accelerator, nothing may touch the
        accelerator."""
        return self._replica.healthy and not self._replica.asleep and self._replicas.pause_id is None

    def _missing(self, wanted: DesiredAdapters) -> dict[str, str]:
        names = self._replica.names
        missing = dict.fromkeys(self._base_names - names, "not among its names; does it serve another model?")
        if self._is_ours_at_all():
            missing |= {
                name: self._failed[name].why if name in self._failed else "is being loaded"
                for name in wanted.adapters
                if self._is_ours(name) and name not in names
            }
        return missing

    def _is_ours_at_all(self) -> bool:
        """Return whether it serves our base model: adapters of another base model do not fit it."""
        return bool(self._base_names & self._replica.names)

    async def _sleeps(self) -> bool:
        """Return whether it sleeps. A server that sleeps although no step has the accelerator is woken."""
        if not self._shares_device:
            return False
        status, answer = await self._replica.upstream.control("GET", "/is_sleeping")
        try:
            asleep = status == 200 and _sleeping.decode(answer).get("is_sleeping", False)
        except msgspec.DecodeError:
            asleep = False
        if not asleep or self._replicas.pause_id is not None:
            return asleep
        with self._replica.busy():
            status, answer = await self._replica.upstream.control("POST", "/wake_up", {}, LOAD_TIMEOUT_S)
        log.warning("vLLM at %s slept though no step has the accelerator, woken: %d", self._replica.url, status)
        return status != 200

    async def _models(self) -> _Models:
        """Return the models that it serves.

        Raises:
            _Unwell: it reports that it is unhealthy, or its answer cannot be read.
            UpstreamDown: it does not answer.
        """
        status, _ = await self._replica.upstream.control("GET", "/health")
        if status != 200:
            raise _Unwell(f"its health check answers {status}")
        status, answer = await self._replica.upstream.control("GET", "/v1/models")
        try:
            if status == 200:
                return _models.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        raise _Unwell(f"it lists no models ({status})")

    async def _load_missing(self, wanted: DesiredAdapters) -> None:
        missing = wanted.adapters.keys() - self._replica.names
        self._failed = {name: failed for name, failed in self._failed.items() if name in missing}
        self._pulls = {name: pull for name, pull in self._pulls.items() if name in missing or not pull.done()}
        for name, adapter in wanted.adapters.items():
            is_due = name not in self._failed or time.monotonic() >= self._failed[name].again_s
            if is_due and self._is_ours(name) and name not in self._replica.names:
                await self._load(name, adapter)

    async def _load(self, name: str, adapter: Adapter) -> None:
        """Load an adapter, or note why it cannot be loaded.

        Raises:
            UpstreamDown: the server does not answer.
        """
        replica = self._replica
        try:
            folder = await self._bring(name, adapter)
            if folder is None or not self._may_change():
                return
            with replica.busy():
                body = {"lora_name": name, "lora_path": str(folder)}
                status, answer = await replica.upstream.control("POST", "/v1/load_lora_adapter", body, LOAD_TIMEOUT_S)
            # Two proxies may load at once: the second gets an error because the name exists, which is fine.
            if status != 200 and name not in {model.id for model in (await self._models()).data}:
                raise _Unwell(f"vLLM refused it: {status} {answer[:300].decode('utf-8', 'replace')}")
        except (AdapterDamaged, NotCopied, StoreError, _Unwell) as error:
            tries = self._failed[name].tries + 1 if name in self._failed else 1
            self._failed[name] = _Failure(str(error), tries, time.monotonic() + retry_after_s(tries))
            return
        self._failed.pop(name, None)
        replica.names |= {name}
        self._replicas.changed()
        log.info("loaded %s into vLLM at %s", name, replica.url)

    async def _bring(self, name: str, adapter: Adapter) -> Path | None:
        """Return the folder to load an adapter from, complete and verified on the server's machine.

        None: it is still under way there. A slow store must delay neither other adapters nor the reports.

        Raises:
            AdapterDamaged, NotCopied, StoreError: it cannot be had.
        """
        if name not in self._pulls:
            self._pulls[name] = asyncio.create_task(self._pull(adapter))
        pull = self._pulls[name]
        await asyncio.wait({pull}, timeout=None if isinstance(self._source, SharedFolder) else PULL_WAITS_S)
        if not pull.done():
            return None
        del self._pulls[name]
        pulled = pull.result()
        if isinstance(pulled, Path):
            return pulled
        raise pulled

    async def _pull(self, adapter: Adapter) -> _Pulled:
        """Bring an adapter to the server's machine. Return its folder there, or the error: it may be read later."""
        try:
            return await asyncio.to_thread(
                self._source.locate, self._replica.url, adapter.folder, adapter.manifest_sha256
            )
        except (AdapterDamaged, NotCopied, StoreError) as error:
            return error

    async def _unload(self, wanted: DesiredAdapters, loaded: frozenset[str]) -> None:
        """Unload adapters that have been over for `drain_s`, the time in which their last requests may still begin.
        `loaded`: the names before the desired state was read."""
        replica, now_s = self._replica, time.monotonic()
        over = {name for name in loaded & replica.names if self._is_ours(name) and name not in wanted.retained}
        self._over_since = {name: self._over_since.get(name, now_s) for name in over}
        for name, since_s in self._over_since.items():
            if now_s - since_s < self._drain_s or replica.using.get(name):
                continue
            replica.names -= {name}
            body = {"lora_name": name}
            status, answer = await replica.upstream.control("POST", "/v1/unload_lora_adapter", body)
            if status == 200:
                log.info("unloaded %s from vLLM at %s", name, replica.url)
            else:
                log.warning("%s: %s was not unloaded: %d %r", replica.url, name, status, answer[:300])

    def _is_ours(self, name: str) -> bool:
        policy, _, version = name.rpartition("@v")
        return policy in self._policies and version != "0"

    async def _report(self) -> None:
        """Report a change to the database, and from time to time that nothing changed."""
        replica = self._replica
        adapters = sorted(name for name in replica.names if "@v" in name and not name.endswith("@v0"))
        report = (replica.state, adapters, replica.reason)
        if report == self._last_report and time.monotonic() - self._reported_s < REPORT_EVERY_S:
            return
        await asyncio.to_thread(
            self._table.report_replica, replica.url, replica.state, adapters, replica.reason, self._seen_at
        )
        self._last_report, self._reported_s = report, time.monotonic()


class _Failure(msgspec.Struct, frozen=True):
    why: str
    tries: int
    again_s: float
    """Earliest next try, monotonic seconds."""


class _Unwell(Exception):
    """The server answered that it is unhealthy."""


def retry_after_s(tries: int) -> float:
    """Return the wait in seconds before the next try, after `tries` failures."""
    return float(min(FIRST_RETRY_S * 2 ** (tries - 1), LONGEST_RETRY_S))
