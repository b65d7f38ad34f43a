"""Versions moved by hand while the proxy serves: the very next request goes by it, or nothing has changed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, update

from migrations import schema
from proxy.api.bodies import Pin, Promote, RollBack, parse_body
from proxy.api.version_moves import Ledger
from proxy.errors import BadRequest, NotJson, VersionRefused
from proxy.recording.recorder import Recorder
from proxy.recording.store import Store
from proxy.upstream.load_balancer import Replica
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for
from tests.unit.whetstone.registry.test_adapters import adapter
from whetstone.config.settings import Settings
from whetstone.database.engine import connect
from whetstone.registry import adapters

ADMIN = "/admin/policies/starter"


class Versions:
    """A policy's versions, on the disk and in the database."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.seed, self.folder = Seed(engine, datetime.now(UTC)), folder
        self.count = 0

    def add(self, state: str = "retired", served: bool = True, **values: Any) -> Path:
        """The next one, made from the one before."""
        self.count += 1
        self.folder.mkdir(exist_ok=True)
        name = f"starter@v{self.count}"
        folder = adapter(self.folder / name)
        row = {"id": name, "version": self.count, "parent": self.count - 1, "state": state, "served": served,
               "adapter_path": str(folder), "manifest_sha256": adapters.verify(folder)}  # fmt: skip
        row |= {"created_at": self.seed.now, "promoted_at": self.seed.now + timedelta(minutes=self.count)}
        self.seed.insert(schema.policy_versions, project="default", policy="starter", **(row | values))
        return folder

    def live(self, version: int) -> None:
        """As if this one had been live from the start."""
        v = schema.policy_versions
        with self.seed.engine.begin() as connection:
            of_policy = v.c.policy == "starter"
            connection.execute(update(v).where(of_policy, v.c.state == "live").values(state="retired"))
            connection.execute(update(v).where(of_policy, v.c.version == version).values(state="live"))
            is_it = schema.policies.c.id == "starter"
            values = {"live_version": version, "next_version": self.count + 1}
            connection.execute(update(schema.policies).where(is_it).values(values))


@pytest.fixture
def versions(proxy: RunningProxy, fake_vllm: FakeVllm, tmp_path: Path) -> Versions:
    """Three versions, the last one live, the first no longer loaded."""
    versions = Versions(proxy.engine, tmp_path / "adapters")
    versions.add(served=False)
    versions.add()
    versions.add()
    wait_for(lambda: fake_vllm.adapters.keys() == {"starter@v2", "starter@v3"})
    versions.live(3)
    wait_for(lambda: proxy.chat().headers.get("x-policy-version") == "3")
    return versions


def speaks(proxy: RunningProxy) -> int:
    """The version that answers a new trajectory."""
    response = proxy.chat()
    assert response.status_code == 200, response.text
    return int(response.headers["x-policy-version"])


def moved(proxy: RunningProxy, move: str, **body: Any) -> dict[str, Any]:
    response = proxy.client.post(f"{ADMIN}/{move}", json=body or None)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def refused(proxy: RunningProxy, status: int, move: str, **body: Any) -> str:
    response = proxy.client.post(f"{ADMIN}/{move}", json=body or None)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"} and error["type"] == "invalid_request_error"
    return str(error["message"])


def row(proxy: RunningProxy, version: int) -> Any:
    (version_row,) = proxy.rows(schema.policy_versions, id=f"starter@v{version}")
    return version_row


def test_a_rollback_takes_effect_on_the_very_next_request(proxy: RunningProxy, versions: Versions) -> None:
    answer = moved(proxy, "rollback", reason="it swears")
    assert speaks(proxy) == 2
    assert answer == {"object": "move", "policy": "starter", "live_version": 2, "before": 3, "rejected": [3]}
    assert (row(proxy, 3).state, row(proxy, 3).reason) == ("rejected", "rolled back to version 2: it swears")


def test_fifty_moves_each_take_effect_on_the_very_next_request(proxy: RunningProxy, versions: Versions) -> None:
    live = 3
    for turn in range(50):
        if turn % 2:
            live = 3
            answer = moved(proxy, "promote", version=3)
        else:
            live = turn // 2 % 3
            answer = moved(proxy, "rollback", to=live)
        assert (answer["live_version"], speaks(proxy)) == (live, live), turn


def test_a_trajectory_leaves_a_version_that_is_rolled_back(proxy: RunningProxy, versions: Versions) -> None:
    def turn() -> str:
        return str(proxy.chat({"X-Trajectory-Id": "mine"}).headers["x-policy-version"])

    assert turn() == "3"
    moved(proxy, "promote", version=2)
    assert turn() == "3"  # pinned: 3 is retired, and loaded
    moved(proxy, "promote", version=3)
    moved(proxy, "rollback")
    assert turn() == "2"


def test_a_version_that_is_not_loaded_is_loaded_before_it_answers(
    proxy: RunningProxy, versions: Versions, fake_vllm: FakeVllm
) -> None:
    assert "starter@v1" not in fake_vllm.adapters
    assert moved(proxy, "rollback", to=1)["rejected"] == [2, 3]
    assert fake_vllm.adapters["starter@v1"] == row(proxy, 1).adapter_path
    assert speaks(proxy) == 1


def test_a_rejected_version_answers_again_when_it_is_promoted(proxy: RunningProxy, versions: Versions) -> None:
    moved(proxy, "rollback", to=0)
    assert speaks(proxy) == 0
    assert moved(proxy, "promote", version=3, reason="all is well")["before"] == 0
    assert speaks(proxy) == 3
    assert (row(proxy, 3).state, row(proxy, 3).reason) == ("live", None)


def test_a_damaged_adapter_is_not_asked_for(proxy: RunningProxy, versions: Versions, fake_vllm: FakeVllm) -> None:
    folder = Path(row(proxy, 1).adapter_path)
    (folder / "adapter_model.safetensors").write_bytes(b"weight?")
    assert "the adapter of starter@v1 is damaged" in refused(proxy, 409, "promote", version=1)
    adapter(folder.parent / "other", b"other weights").rename(folder.parent / "new")
    for file in (folder.parent / "new").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert "is another one than the database has noted" in refused(proxy, 409, "rollback", to=1)
    assert not row(proxy, 1).served and speaks(proxy) == 3
    assert ("/v1/load_lora_adapter", "starter@v1") not in fake_vllm.controls


def test_what_cannot_be_done_changes_nothing(proxy: RunningProxy, versions: Versions) -> None:
    before = proxy.rows(schema.policy_versions)
    assert "starter has no version 9" in refused(proxy, 409, "promote", version=9)
    assert "does not descend from version 9; it can go back to 2, 1, 0" in refused(proxy, 409, "rollback", to=9)
    assert "starter has no version 9" in refused(proxy, 409, "pin", version=9)
    assert proxy.rows(schema.policy_versions) == before
    assert proxy.rows(schema.gate_results) == []


def test_a_pinned_version_is_loaded_soon_and_no_longer_once_it_is_not_pinned(
    proxy: RunningProxy, versions: Versions, fake_vllm: FakeVllm
) -> None:
    answer = moved(proxy, "pin", version=1)
    assert answer == {"object": "pin", "policy": "starter", "version": 1, "pinned": True}
    wait_for(lambda: "starter@v1" in fake_vllm.adapters)
    wait_for(lambda: proxy.chat(model="starter@v1").headers.get("x-policy-version") == "1")
    assert row(proxy, 1).pinned_at is not None
    moved(proxy, "pin", version=1, pinned=False)
    assert (row(proxy, 1).pinned_at, row(proxy, 1).served) == (None, True)  # it is among the two newest


def test_every_move_is_written_down(proxy: RunningProxy, versions: Versions) -> None:
    moved(proxy, "pin", version=2)
    moved(proxy, "rollback", reason="NUL \0 in it")
    moved(proxy, "promote", version=3)
    moved(proxy, "promote", version=3)  # it is live already
    moved(proxy, "pin", version=2, pinned=False)
    answer = proxy.client.get(f"{ADMIN}/decisions").json()
    assert answer["object"] == "list"
    assert [(one["decision"], one["version"], one["against"], one["reason"]) for one in answer["data"]] == [
        ("unpin", 2, None, None),
        ("promote", 3, 2, None),
        ("rollback", 3, 2, "NUL \ufffd in it"),
        ("pin", 2, None, None),
    ]
    assert {one["test"] for one in answer["data"]} == {"hand"}


def test_policies_and_versions_are_told_as_they_stand(proxy: RunningProxy, versions: Versions) -> None:
    versions.add("candidate", tested_by="canary", canary_share=0.25, probe_k3=0.001)
    (policy,) = proxy.client.get("/admin/policies").json()["data"]
    assert (policy["policy"], policy["live_version"], policy["state"]) == ("starter", 3, "recording")
    answer = proxy.client.get(f"{ADMIN}/versions").json()["data"]
    assert [one["version"] for one in answer] == [4, 3, 2, 1, 0]
    assert (answer[0]["state"], answer[0]["tested_by"], answer[0]["canary_share"], answer[0]["probe_k3"]) == (
        "candidate", "canary", 0.25, 0.001
    )  # fmt: skip
    assert (answer[1]["state"], answer[1]["served"], answer[3]["served"], answer[1]["heldout_mean"]) == (
        "live", True, False, None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("move", "body", "message"),
    [
        ("promote", {}, "Object missing required field `version`; fields are version, reason"),
        ("promote", {"version": -1}, "version"),
        ("promote", {"version": True}, "version"),
        ("promote", {"version": "3"}, "version"),
        ("promote", {"version": 1, "reason": "x" * 501}, "reason"),
        ("rollback", {"version": 1}, "unknown field `version`; fields are to, reason"),
        ("rollback", {"to": 1.5}, "to"),
        ("pin", {"version": 1, "pinned": "no"}, "pinned"),
    ],
)
def test_a_move_that_cannot_be_meant_is_refused(
    door: RunningProxy, move: str, body: dict[str, Any], message: str
) -> None:
    kind = {"promote": Promote, "rollback": RollBack, "pin": Pin}[move]
    with pytest.raises(BadRequest, match=message):
        parse_body(msgspec.json.encode(body), kind)
    assert message.replace("\\", "") in refused(door, 400, move, **body)


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"reason": ' + b"[" * 100_000])
def test_what_is_no_json_is_refused(door: RunningProxy, body: bytes) -> None:
    with pytest.raises((NotJson, BadRequest)):
        parse_body(body, RollBack)
    assert door.client.post(f"{ADMIN}/rollback", content=body).status_code == 400


@pytest.mark.parametrize("name", ["nobody", "starter@v0", "x" * 5000, "a b"])
def test_an_unknown_policy_is_told_which_there_are(door: RunningProxy, name: str) -> None:
    for method, path in (("GET", "versions"), ("GET", "decisions"), ("POST", "rollback"), ("POST", "pin")):
        response = door.client.request(method, f"/admin/policies/{name}/{path}")
        assert response.status_code == 404
        assert response.json()["error"]["message"].endswith("there are: starter")


def test_a_page_of_another_origin_moves_nothing(plain_proxy: RunningProxy) -> None:
    response = plain_proxy.client.post(f"{ADMIN}/rollback", headers={"Origin": "https://evil.example"})
    assert response.status_code == 403


def test_the_document_tells_every_field_of_a_move(door: RunningProxy) -> None:
    paths = door.client.get("/openapi.json").json()["paths"]
    for move, kind in (("promote", Promote), ("rollback", RollBack), ("pin", Pin)):
        answer = paths[f"/admin/policies/{{policy}}/{move}"]["post"]["requestBody"]
        body = answer["content"]["application/json"]["schema"]
        assert answer["required"] is (move != "rollback")
        assert body["properties"].keys() == set(kind.__struct_fields__)
        assert body["additionalProperties"] is False


class Servers:
    """A ledger in front of servers whose state a test sets."""

    def __init__(self, settings: Settings, engine: Engine, tmp_path: Path, count: int) -> None:
        self.settings, self.engine, self.folder = settings, engine, tmp_path / "journal"
        no_server: Any = None  # no server is asked anything here
        self.replicas = [Replica(f"http://vllm-{number}", no_server) for number in range(count)]
        for replica in self.replicas:
            replica.healthy, replica.names = True, frozenset({"starter@v0", "starter@v2", "starter@v3"})
        self.refreshed = 0

    def do(self, move: Callable[[Ledger], Awaitable[Any]], load_waits_s: float = 0.1) -> Any:
        async def run() -> Any:
            recorder = Recorder(Store(self.engine), self.folder, lambda: None, lambda _: None, lambda _: None)
            recorder.start()
            ledger = Ledger(self.settings, self.engine, recorder, self.replicas, self.refresh, load_waits_s)
            try:
                return await move(ledger)
            finally:
                await recorder.close()

        return asyncio.run(run())

    async def refresh(self) -> None:
        self.refreshed += 1

    def row(self, version: int) -> Any:
        return Seed(self.engine).one(schema.policy_versions, f"starter@v{version}")


@pytest.fixture
def servers(sqlite_url: str, tmp_path: Path) -> Iterator[Servers]:
    """Two, and three versions as above."""
    settings = settings_for(sqlite_url, "http://127.0.0.1:1", tmp_path)
    engine = connect(sqlite_url)
    servers = Servers(settings, engine, tmp_path, 2)
    versions = Versions(servers.engine, tmp_path / "adapters")
    versions.add(served=False)
    versions.add()
    versions.add()
    versions.live(3)
    yield servers
    engine.dispose()


def test_a_version_that_one_server_does_not_load_answers_on_none(servers: Servers) -> None:
    servers.replicas[0].names |= {"starter@v1"}
    servers.replicas[1].missing = {"starter@v1": "vLLM refused it: 500 no room"}
    with pytest.raises(
        VersionRefused, match="nothing was changed.*http://vllm-1: vLLM refused it: 500 no room"
    ) as refusal:
        servers.do(lambda ledger: ledger.promote("starter", 1, None))
    assert "vllm-0" not in refusal.value.message
    assert (servers.row(1).state, servers.row(1).served, servers.row(3).state) == ("retired", False, "live")
    assert servers.refreshed == 0


def test_a_rejected_version_that_cannot_be_loaded_is_rejected_still(servers: Servers) -> None:
    servers.do(lambda ledger: ledger.roll_back("starter", None, None))
    for replica in servers.replicas:
        replica.names -= {"starter@v3"}
    with pytest.raises(VersionRefused, match="is being loaded"):
        servers.do(lambda ledger: ledger.promote("starter", 3, None))
    assert (servers.row(3).state, servers.row(3).served) == ("rejected", False)


def test_a_server_that_is_away_is_not_waited_for(servers: Servers) -> None:
    servers.replicas[0].names |= {"starter@v1"}
    servers.replicas[1].healthy = False
    assert servers.do(lambda ledger: ledger.promote("starter", 1, None)).live == 1
    assert servers.refreshed == 1


def test_while_every_server_is_away_what_they_had_may_answer_and_nothing_else(servers: Servers) -> None:
    for replica in servers.replicas:
        replica.healthy, replica.why_away = False, "refused the connection"
    assert servers.do(lambda ledger: ledger.roll_back("starter", None, None)).live == 2
    with pytest.raises(VersionRefused, match="http://vllm-0: refused the connection"):
        servers.do(lambda ledger: ledger.roll_back("starter", 1, None))
    assert servers.do(lambda ledger: ledger.roll_back("starter", 0, None)).live == 0  # the base model is always there


def test_servers_are_asked_at_once_to_load_what_is_wanted(servers: Servers) -> None:
    async def promote(ledger: Ledger) -> Any:
        async def load(replica: Replica) -> None:
            await replica.bring_now.wait()
            assert servers.row(1).served
            replica.names |= {"starter@v1"}

        loads = [asyncio.ensure_future(load(replica)) for replica in servers.replicas]
        move = await ledger.promote("starter", 1, None)
        await asyncio.gather(*loads)
        return move

    assert servers.do(promote, load_waits_s=30).live == 1
