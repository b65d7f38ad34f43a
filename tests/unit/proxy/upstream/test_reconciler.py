"""Each vLLM server is brought to what the database says, whatever it has lost, refuses or still has."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from migrations import schema
from proxy.upstream.load_balancer import Replica, Replicas
from proxy.upstream.reconciler import Reconciler, retry_after_s
from proxy.upstream.replica_store import Adapter, DesiredAdapters
from proxy.upstream.server import Request, Upstream
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for
from tests.unit.whetstone.registry.test_adapters import adapter
from whetstone.registry.adapters import MANIFEST, StoreUnreachable
from whetstone.registry.remote.sources import AdapterSource

Start = Callable[..., RunningProxy]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

# --- one turn


@dataclass
class Tables:
    """What the database says, by hand."""

    adapters: dict[str, Adapter] = field(default_factory=dict)
    retained: set[str] = field(default_factory=set)
    away: bool = False
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def wanted(self) -> DesiredAdapters:
        if self.away:
            raise OperationalError("SELECT", {}, Exception("away"))
        return DesiredAdapters(self.adapters, frozenset({*self.adapters, *self.retained}))

    def report_replica(
        self, url: str, state: str, adapters: Sequence[str], reason: str | None, seen_at: datetime | None
    ) -> None:
        self.told.append((state, list(adapters), reason))


@dataclass
class Looked:
    """A server that is looked after by hand."""

    replica: Replica
    replicas: Replicas
    tables: Tables
    drain_s: float = 0.0
    policies: Sequence[str] = ("starter",)
    source: AdapterSource | None = None

    def __post_init__(self) -> None:
        self.reconciler = Reconciler(
            self.replica, self.replicas, self.tables, self.policies, self.drain_s, shares_device=False,
            source=self.source,
        )  # fmt: skip

    async def turn(self) -> None:
        await self.reconciler.look()
        await self.reconciler.reconcile()


def looked_after(fake: FakeVllm, tables: Tables, do: Callable[[Looked], Awaitable[None]], **values: Any) -> None:
    async def run() -> None:
        replica = Replica(fake.url, Upstream(fake.url + "/v1", 10))
        try:
            await do(Looked(replica, Replicas([replica], 1, 20), tables, **values))
        finally:
            await replica.upstream.close()

    asyncio.run(run())


@pytest.fixture
def v1(tmp_path: Path) -> Adapter:
    return Adapter(adapter(tmp_path / "starter@v1"), None)


def test_what_is_missing_is_loaded_and_told(fake_vllm: FakeVllm, v1: Adapter) -> None:
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        await looked.turn()
        assert looked.replica.has("starter@v1")

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.adapters == {"starter@v1": str(v1.folder)}
    assert tables.told == [("serving", ["starter@v1"], None)]


def test_what_somebody_else_has_loaded_meanwhile_is_as_good(fake_vllm: FakeVllm, v1: Adapter) -> None:
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        await looked.reconciler.look()
        fake_vllm.adapters["starter@v1"] = "/adapters/starter@v1"
        await looked.reconciler.reconcile()
        assert looked.replica.state == "serving"

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.controls == [(LOAD, "starter@v1")]


@pytest.mark.parametrize("of_another", [False, True])
def test_a_damaged_folder_is_not_loaded_and_tried_again_later(
    fake_vllm: FakeVllm, v1: Adapter, of_another: bool
) -> None:
    if of_another:
        v1 = Adapter(v1.folder, "0" * 64)
    else:
        (v1.folder / "adapter_model.safetensors").write_bytes(b"weightz")
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        for _ in range(3):
            await looked.turn()
        assert (looked.replica.state, looked.replica.has("starter@v0")) == ("behind", True)

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.controls == []
    ((state, adapters, reason),) = tables.told
    assert (state, adapters) == ("behind", [])
    assert "starter@v1: " in reason and ("database" if of_another else "SHA-256") in reason


def test_what_the_server_refuses_is_tried_again_with_growing_pauses(fake_vllm: FakeVllm, v1: Adapter) -> None:
    fake_vllm.refuses["starter@v1"] = "no room"
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        for _ in range(3):
            await looked.turn()

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.controls == [(LOAD, "starter@v1")], "the second try waits"
    assert "no room" in tables.told[0][2]
    assert [retry_after_s(tries) for tries in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


class Source:
    """Where the server's machine gets adapters from: by hand, and as slowly as `arrived` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrived = threading.Event()
        self.error: StoreUnreachable | None = None
        self.calls: list[tuple[str, str | None]] = []

    def locate(self, url: str, folder: Path, manifest_sha256: str | None) -> Path:
        self.calls.append((folder.name, manifest_sha256))
        if folder.name == "starter@v1":
            self.arrived.wait(20)
            if self.error is not None:
                raise self.error
        return self.folder / folder.name


def test_an_adapter_that_is_slow_to_arrive_delays_no_other_and_is_pulled_once(
    fake_vllm: FakeVllm, v1: Adapter, tmp_path: Path
) -> None:
    source = Source(tmp_path / "pulled")
    v2 = Adapter(tmp_path / "starter@v2", "2" * 64)
    tables = Tables({"starter@v1": Adapter(v1.folder, "1" * 64), "starter@v2": v2})

    async def do(looked: Looked) -> None:
        await looked.turn()
        assert fake_vllm.adapters == {"starter@v2": str(tmp_path / "pulled" / "starter@v2")}
        assert (looked.replica.state, looked.replica.reason) == ("behind", "starter@v1: is being loaded")
        source.arrived.set()
        await looked.turn()
        assert looked.replica.state == "serving"

    looked_after(fake_vllm, tables, do, source=source)
    assert fake_vllm.adapters["starter@v1"] == str(tmp_path / "pulled" / "starter@v1")
    assert source.calls == [("starter@v1", "1" * 64), ("starter@v2", "2" * 64)]


def test_a_store_that_is_away_is_the_reason_and_nothing_is_loaded(
    fake_vllm: FakeVllm, v1: Adapter, tmp_path: Path
) -> None:
    source = Source(tmp_path)
    source.arrived.set()
    source.error = StoreUnreachable("s3://bucket: no answer within 60 s")

    async def do(looked: Looked) -> None:
        for _ in range(3):
            await looked.turn()
        reason = "starter@v1: s3://bucket: no answer within 60 s"
        assert (looked.replica.state, looked.replica.reason) == ("behind", reason)
        assert looked.replica.has("starter@v0")

    looked_after(fake_vllm, Tables({"starter@v1": v1}), do, source=source)
    assert fake_vllm.controls == [] and len(source.calls) == 1, "the second try waits"


def test_a_bad_adapter_stops_no_other(fake_vllm: FakeVllm, v1: Adapter, tmp_path: Path) -> None:
    bad = Adapter(adapter(tmp_path / "starter@v2"), None)
    (bad.folder / MANIFEST).unlink()
    looked_after(fake_vllm, Tables({"starter@v2": bad, "starter@v1": v1}), lambda looked: looked.turn())
    assert fake_vllm.adapters.keys() == {"starter@v1"}


def test_another_models_server_gets_no_adapters(v1: Adapter) -> None:
    tables = Tables({"starter@v1": v1})
    with FakeVllm(base_names=["llama"]) as other:
        looked_after(other, tables, lambda looked: looked.turn())
        assert other.controls == []
    assert tables.told == [("behind", [], "starter@v0: not among its names; does it serve another model?")]


def test_a_policy_that_the_server_does_not_know_yet_takes_nothing_from_the_others(
    fake_vllm: FakeVllm, v1: Adapter
) -> None:
    tables = Tables({"starter@v1": v1})
    looked_after(fake_vllm, tables, lambda looked: looked.turn(), policies=["starter", "third"])
    assert fake_vllm.adapters.keys() == {"starter@v1"}
    ((state, adapters, reason),) = tables.told
    assert (state, adapters) == ("behind", ["starter@v1"])
    assert reason.startswith("third@v0: ")


def test_what_is_over_is_unloaded_after_its_drain_and_not_before(fake_vllm: FakeVllm) -> None:
    fake_vllm.adapters = dict.fromkeys(["starter@v1", "starter@v2", "starter@v3", "other@v1"], "/adapters")
    tables = Tables(retained={"starter@v2", "starter@v3"})

    async def not_yet(looked: Looked) -> None:
        await looked.turn()
        await looked.turn()

    looked_after(fake_vllm, tables, not_yet, drain_s=3600)
    assert fake_vllm.controls == []

    async def once_over(looked: Looked) -> None:
        await looked.reconciler.look()
        looked.replica.take("starter@v1")
        await looked.turn()
        assert fake_vllm.controls == [], "somebody is being answered by it"
        looked.replica.is_through("starter@v1")
        await looked.turn()
        assert not looked.replica.has("starter@v1")

    looked_after(fake_vllm, tables, once_over)
    assert fake_vllm.controls == [(UNLOAD, "starter@v1")], "the others are kept, or not ours"


def test_a_server_that_comes_back_gets_its_adapters_though_the_database_is_away(
    fake_vllm: FakeVllm, v1: Adapter
) -> None:
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        await looked.turn()
        tables.away = True
        fake_vllm.adapters.clear()
        await looked.turn()

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.adapters.keys() == {"starter@v1"}


def test_nothing_is_unloaded_while_the_database_does_not_say_what_is_over(fake_vllm: FakeVllm, v1: Adapter) -> None:
    fake_vllm.adapters["starter@v1"] = str(v1.folder)
    tables = Tables(away=True)

    async def do(looked: Looked) -> None:
        await looked.turn()
        tables.away = False
        tables.adapters["starter@v1"] = v1
        await looked.turn()
        tables.away = True
        fake_vllm.adapters["starter@v2"] = "/adapters/starter@v2"  # newer than what was told last
        await looked.turn()

    looked_after(fake_vllm, tables, do)
    assert fake_vllm.controls == []


def test_what_was_loaded_while_the_server_was_looked_at_is_not_lost_again(fake_vllm: FakeVllm) -> None:
    async def do(looked: Looked) -> None:
        looking = asyncio.ensure_future(looked.reconciler.look())
        await asyncio.sleep(0)
        looked.replica.names |= {"starter@v1"}
        await looking
        assert looked.replica.has("starter@v1") and looked.replica.has("starter@v0")
        await looked.reconciler.look()
        assert not looked.replica.has("starter@v1"), "a look that began later knows better"

    looked_after(fake_vllm, Tables(), do)


def test_who_found_the_server_away_while_it_was_looked_at_is_answered_after_the_look(fake_vllm: FakeVllm) -> None:
    async def do(looked: Looked) -> None:
        await looked.turn()
        looking = asyncio.ensure_future(looked.reconciler.look())
        await asyncio.sleep(0)
        looked.replica.healthy = False
        asked = Request("/v1/chat/completions", b'{"model": "starter@v0"}', "c", "starter@v0", "t")
        with await looked.replicas.ask(lambda: asked) as response:
            assert (response.status, looking.done()) == (200, True)

    looked_after(fake_vllm, Tables(), do)


def test_one_that_is_away_is_told_with_what_it_had(fake_vllm: FakeVllm, v1: Adapter) -> None:
    tables = Tables({"starter@v1": v1})

    async def do(looked: Looked) -> None:
        await looked.turn()
        fake_vllm.close()
        await looked.turn()

    looked_after(fake_vllm, tables, do)
    state, adapters, reason = tables.told[-1]
    assert (state, adapters) == ("away", ["starter@v1"])
    assert "Connect" in reason


# --- the proxy as it runs


class Versions:
    """Puts versions with real folders into the database."""

    def __init__(self, proxy: RunningProxy, folder: Path) -> None:
        self._proxy, self._folder = proxy, folder

    def add(self, version: int, **values: Any) -> Path:
        name = f"starter@v{version}"
        folder = adapter(self._folder / name)
        policy = self._proxy.rows(schema.policies)[0]
        row = {"project": "default", "id": name, "policy": "starter", "version": version, "state": "live"}
        row |= {"served": True, "adapter_path": str(folder), "created_at": policy.created_at}
        Seed(self._proxy.engine, policy.created_at).insert(schema.policy_versions, **(row | values))
        return folder

    def live(self, version: int) -> None:
        with self._proxy.engine.begin() as connection:
            connection.execute(schema.policies.update().values(live_version=version))


def replicas(proxy: RunningProxy) -> dict[str, Any]:
    """The rows, by address."""
    with proxy.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        return {row.id: row for row in connection.execute(schema.replicas.select())}


@pytest.fixture
def two() -> Iterator[tuple[FakeVllm, FakeVllm]]:
    with FakeVllm() as one, FakeVllm() as other:
        yield one, other


def test_a_server_that_was_started_again_answers_nobody_before_it_has_its_adapters(
    database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(database_url, fake_vllm.url, tmp_path, proxy={"max_wait_s": 60}))
    versions = Versions(proxy, tmp_path)
    versions.add(1)
    wait_for(lambda: fake_vllm.adapters.keys() == {"starter@v1"})
    versions.live(1)
    wait_for(lambda: proxy.chat().headers["x-policy-version"] == "1")
    fake_vllm.close()
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(proxy.chat) for _ in range(4)]
        wait_for(lambda: proxy.client.get("/readyz").json()["waiting"] == 4)
        with FakeVllm(fake_vllm.server_port) as again:
            said = [answer.result() for answer in answers]
            assert [(one.status_code, one.headers["x-policy-version"]) for one in said] == [(200, "1")] * 4
            assert again.controls == [(LOAD, "starter@v1")]
            assert len(again.requests) == 4, "none was asked for an adapter that was not there"


def test_a_server_whose_load_fails_answers_as_no_other_version(
    two: tuple[FakeVllm, FakeVllm], sqlite_url: str, tmp_path: Path, start: Start
) -> None:
    one, other = two
    proxy = start(settings_for(sqlite_url, [one.url, other.url], tmp_path))
    versions = Versions(proxy, tmp_path)
    one.refuses["starter@v1"] = "no room"
    versions.add(1)
    wait_for(lambda: "starter@v1" in other.adapters)
    wait_for(lambda: one.url in replicas(proxy) and replicas(proxy)[one.url].state == "behind")
    assert "no room" in replicas(proxy)[one.url].reason
    versions.live(1)
    wait_for(lambda: proxy.chat().headers["x-policy-version"] == "1")
    before = len(one.requests)
    said = [proxy.chat({"X-Trajectory-Id": f"t{n}"}) for n in range(20)]
    assert {(answer.status_code, answer.headers["x-policy-version"]) for answer in said} == {(200, "1")}
    assert len(one.requests) == before
    ready = proxy.client.get("/readyz")
    assert (ready.status_code, ready.json()["replicas"][one.url]["state"]) == (200, "behind")
    one.refuses.clear()
    wait_for(lambda: replicas(proxy)[one.url].state == "serving")
    assert replicas(proxy)[one.url].adapters == ["starter@v1"]
    for n in range(20):
        assert proxy.chat({"X-Trajectory-Id": f"u{n}"}).headers["x-policy-version"] == "1"
    assert len(one.requests) > before
    assert {request["model"] for request in one.requests[before:]} == {"starter@v1"}


def test_a_trajectory_does_not_wait_for_a_version_that_no_server_takes(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path))
    versions, here = Versions(proxy, tmp_path), {"X-Trajectory-Id": "t"}
    versions.add(1)
    versions.live(1)
    wait_for(lambda: proxy.chat().headers.get("x-policy-version") == "1")
    assert proxy.chat(here).headers["x-policy-version"] == "1"
    with proxy.engine.begin() as connection:
        connection.execute(schema.policy_versions.update().values(state="retired"))
    versions.add(2)
    versions.live(2)
    wait_for(lambda: proxy.chat().headers.get("x-policy-version") == "2")
    assert proxy.chat(here).headers["x-policy-version"] == "1"
    fake_vllm.refuses["starter@v1"] = "no room"
    del fake_vllm.adapters["starter@v1"]  # as a server that was started again
    wait_for(lambda: proxy.chat(here).headers.get("x-policy-version") == "2")


def test_what_is_no_longer_served_is_unloaded_and_a_candidate_is_kept(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"drain_s": 0}))
    versions = Versions(proxy, tmp_path)
    fake_vllm.adapters["starter@v2"] = "/adapters"  # the trainer has loaded it, to be probed
    versions.add(2, state="candidate", served=False)
    versions.add(1)
    wait_for(lambda: fake_vllm.adapters.keys() == {"starter@v1", "starter@v2"})
    with proxy.engine.begin() as connection:
        over = schema.policy_versions.update().where(schema.policy_versions.c.version == 1)
        connection.execute(over.values(state="retired", served=False))
    wait_for(lambda: fake_vllm.adapters.keys() == {"starter@v2"})
    assert fake_vllm.controls == [(LOAD, "starter@v1"), (UNLOAD, "starter@v1")]


def test_servers_that_the_settings_no_longer_name_are_forgotten(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Start
) -> None:
    settings = settings_for(sqlite_url, fake_vllm.url, tmp_path)
    first = start(settings)
    wait_for(lambda: fake_vllm.url in replicas(first))
    with FakeVllm() as other:
        moved = settings.model_copy(update={"vllm": settings.vllm.model_copy(update={"urls": (other.url,)})})
        first.stop()
        second = start(moved)
        wait_for(lambda: replicas(second).keys() == {other.url})


def test_a_promotion_leaves_the_proxy_ready(fake_vllm: FakeVllm, sqlite_url: str, tmp_path: Path, start: Start) -> None:
    """Whoever made a version loads it and promotes it at once, sooner than the proxy looks at its servers again."""
    proxy = start(settings_for(sqlite_url, fake_vllm.url, tmp_path))
    versions = Versions(proxy, tmp_path)
    for version in range(1, 6):
        fake_vllm.adapters[f"starter@v{version}"] = str(tmp_path / f"starter@v{version}")
        versions.add(version)
        versions.live(version)
        ready = []
        while proxy.chat().headers["x-policy-version"] != str(version):
            ready.append(proxy.client.get("/readyz").status_code)
        ready.append(proxy.client.get("/readyz").status_code)
        assert set(ready) == {200}
