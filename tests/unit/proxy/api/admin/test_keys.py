"""`/admin/keys`: made, listed, taken back, of one's own project and from the next request on."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from migrations import schema
from tests.unit.proxy.conftest import RunningProxy, wait_for
from tests.unit.whetstone.cli.commands.test_keys import create, keys
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from tests.unit.whetstone.domain.test_api_keys import make
from whetstone.config.settings import API_KEY_VARIABLE
from whetstone.domain.api_keys import hash_of
from whetstone.stack.admin_client import ProxyUnreachable, ask

PATH = "/admin/keys"


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def admin(proxy: RunningProxy) -> dict[str, str]:
    """The headers of an admin; from then on the proxy asks for keys."""
    response = proxy.client.post(PATH, json={"name": "admin", "scopes": ["admin"]})
    assert response.status_code == 201, response.text
    return by(response.json()["key"])


def test_the_first_key_closes_the_door_at_once(proxy: RunningProxy) -> None:
    assert proxy.client.get("/v1/models").status_code == 200
    made = proxy.client.post(PATH, json={"name": "app", "scopes": ["inference"]})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    assert proxy.client.get("/v1/models").status_code == 401
    assert proxy.client.get("/v1/models", headers=by(made.json()["key"])).status_code == 200


def test_a_key_is_told_once_and_kept_as_a_hash(proxy: RunningProxy, admin: dict[str, str]) -> None:
    body = {"name": "for the app", "scopes": ["feedback", "inference"], "expires": "90d", "requests_per_min": 60}
    before = datetime.now(UTC)
    created = proxy.client.post(PATH, json=body, headers=admin).json()
    assert created["object"] == "key" and created["key"].startswith(f"wsk_{created['key_id']}_")
    assert (created["scopes"], created["requests_per_min"], created["tokens_per_min"]) == (
        ["inference", "feedback"],
        60,
        None,
    )
    lifetime = datetime.fromisoformat(created["expires_at"]) - before
    assert timedelta(days=90) <= lifetime < timedelta(days=90, minutes=5)
    (row,) = proxy.rows(schema.api_keys, id=created["key_id"])
    assert (row.project, row.name, row.secret_sha256) == ("default", "for the app", hash_of(created["key"].encode()))
    listed = proxy.client.get(PATH, headers=admin)
    assert [one["name"] for one in listed.json()["data"]] == ["for the app", "admin"]
    assert created["key"] not in listed.text and row.secret_sha256 not in listed.text


def test_a_revoked_key_opens_nothing_from_the_next_request_on(proxy: RunningProxy, admin: dict[str, str]) -> None:
    created = proxy.client.post(PATH, json={"name": "app", "scopes": ["inference"]}, headers=admin).json()
    assert proxy.client.get("/v1/models", headers=by(created["key"])).status_code == 200
    for _ in range(2):  # again does no harm
        answer = proxy.client.delete(f"{PATH}/{created['key_id']}", headers=admin)
        assert (answer.status_code, answer.json()["revoked"]) == (200, True)
    assert proxy.client.get("/v1/models", headers=by(created["key"])).status_code == 401


def test_another_projects_keys_are_neither_seen_nor_revoked(proxy: RunningProxy, admin: dict[str, str]) -> None:
    theirs, _ = make(proxy.engine, "theirs", project="acme")
    unknown = proxy.client.delete(f"{PATH}/nosuch", headers=admin)
    answer = proxy.client.delete(f"{PATH}/{theirs}", headers=admin)
    assert unknown.status_code == answer.status_code == 404
    assert answer.json()["error"]["message"] == unknown.json()["error"]["message"].replace("nosuch", theirs)
    assert proxy.rows(schema.api_keys, id=theirs)[0].revoked_at is None
    assert "theirs" not in proxy.client.get(PATH, headers=admin).text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 101}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["everything"]}, "scopes"),
        ({"scopes": "admin"}, "scopes"),
        ({"expires": "soon"}, "'soon' is no time; write 12h, 90d or 2w"),
        ({"requests_per_min": 0}, "requests_per_min"),
        ({"tokens_per_min": 10**10}, "tokens_per_min"),
        ({"project": "acme"}, "unknown field `project`; fields are name, scopes"),
    ],
)
def test_a_key_that_cannot_be_meant_is_refused(door: RunningProxy, changed: dict[str, Any], message: str) -> None:
    response = door.client.post(PATH, json={"name": "app", "scopes": ["inference"]} | changed)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    with door.engine.connect() as connection:
        assert connection.execute(select(schema.api_keys)).all() == []


def test_the_view_for_admins_has_no_hash(proxy: RunningProxy, admin: dict[str, str]) -> None:
    with proxy.engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM admin_keys")).mappings().one()
    assert row["name"] == "admin" and not [name for name in row if "sha" in name or "secret" in name]


def test_the_command_lines_keys_count_for_a_proxy_that_runs(
    proxy: RunningProxy, database_url: str, tmp_path: Path
) -> None:
    data = tmp_path / "elsewhere"
    assert proxy.client.get("/v1/models").status_code == 200
    key = create(data, WHETSTONE_DATABASE=database_url)
    wait_for(lambda: proxy.client.get("/v1/models").status_code == 401)
    assert proxy.client.get("/v1/models", headers=by(key)).status_code == 200
    wait_for(lambda: proxy.rows(schema.api_keys)[0].last_used_at is not None)
    assert keys(data, "revoke", key, WHETSTONE_DATABASE=database_url).exit_code == 0
    wait_for(lambda: proxy.client.get("/v1/models", headers=by(key)).status_code == 401)


def test_the_command_line_asks_with_the_key_of_its_environment(
    proxy: RunningProxy, admin: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_addresses(tmp_path, proxy=proxy.url)
    for wrong in (None, "wsk_wrong", make(proxy.engine)[1]):
        if wrong is not None:
            monkeypatch.setenv(API_KEY_VARIABLE, wrong)
        with pytest.raises(
            ProxyUnreachable, match=f"the key in {API_KEY_VARIABLE}, which needs the scope admin"
        ) as caught:
            ask(tmp_path, "starter", "step", {}, look="")
        assert wrong is None or wrong not in str(caught.value)
    monkeypatch.setenv(API_KEY_VARIABLE, admin["authorization"].removeprefix("Bearer "))
    assert b"asked_at" in ask(tmp_path, "starter", "step", {}, look="")
