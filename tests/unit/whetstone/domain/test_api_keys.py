"""Keys: made, hashed, read; the first one; what the table keeps of them."""

import hashlib
import logging
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select

from migrations import schema
from tests.conftest import NOW, Seed
from whetstone.config.settings import BOOTSTRAP_VARIABLE, Settings, SettingsError, as_environment, load
from whetstone.domain.api_keys import SCOPES, Principal, anybody, hash_of, id_of, new_key, read_lifetime, read_scopes
from whetstone.registry import api_key_store
from whetstone.stack.stack import running

FIRST = "operators-choice-0123456789abcdef"


def settings(host: str = "127.0.0.1", **values: Any) -> Settings:
    return Settings(proxy={"host": host, "port": 0}, **values)  # type: ignore[arg-type]


def make(engine: Engine, name: str = "app", project: str = "default", **values: Any) -> tuple[str, str]:
    """A key's id and text."""
    key_id, key = new_key()
    values = {"scopes": ["inference"], "created_at": NOW} | values
    with engine.begin() as connection:
        assert api_key_store.create(
            connection, api_key_store.KeyRecord(project, name, **values), key_id, hash_of(key.encode())
        )
    return key_id, key


def living(engine: Engine, *projects: str, at: datetime = NOW) -> set[str | None]:
    with engine.connect() as connection:
        found = api_key_store.living(connection, projects or ("default",), at)
    return {principal.key_id for principal, _ in found.values()}


def test_a_key_has_an_id_that_may_be_seen_and_a_secret_of_256_bits() -> None:
    key_id, key = new_key()
    assert re.fullmatch(rf"wsk_{key_id}_[A-Za-z0-9]{{43}}", key) and re.fullmatch("[a-z0-9]{12}", key_id)
    assert 62**43 > 2**256
    assert len({new_key()[1] for _ in range(100)}) == 100


def test_the_hash_is_that_of_the_whole_text() -> None:
    assert hash_of(b"wsk_a_b") == hashlib.sha256(b"wsk_a_b").hexdigest()


def test_a_whole_key_names_itself_by_its_id() -> None:
    key_id, key = new_key()
    assert id_of(key) == id_of(key_id) == key_id
    assert id_of("anything") == "anything"


def test_admin_implies_the_other_scopes_and_nothing_else_implies_anything() -> None:
    allowed = {
        scope: {one for one in SCOPES if Principal("p", "k", frozenset({scope})).allows(one)} for scope in SCOPES
    }
    assert allowed == {"inference": {"inference"}, "feedback": {"feedback"}, "admin": set(SCOPES)}
    assert all(anybody("p").allows(scope) for scope in SCOPES)


def test_scopes_are_read_once_each_and_in_one_order() -> None:
    assert read_scopes(["feedback", "inference", "feedback"]) == ["inference", "feedback"]
    with pytest.raises(ValueError, match="'read' is no scope; there are: inference, feedback, admin"):
        read_scopes(["inference", "read"])
    with pytest.raises(ValueError, match="needs a scope"):
        read_scopes([])


def test_a_lifetime_is_hours_days_or_weeks() -> None:
    assert read_lifetime("12h") == timedelta(hours=12)
    assert read_lifetime("90d") == timedelta(days=90)
    assert read_lifetime("2w") == timedelta(weeks=2)


@pytest.mark.parametrize("text", ["", "90", "d", "0d", "-1d", "1.5d", "3651d", "999999w", "9" * 30 + "d", "1d\n"])
def test_what_is_no_lifetime_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_lifetime(text)


def test_only_the_hash_of_a_key_is_kept(engine: Engine, seed: Seed) -> None:
    key_id, key = make(engine, scopes=["inference", "feedback"], requests_per_min=60)
    row = seed.one(schema.api_keys, key_id)
    assert row.secret_sha256 == hash_of(key.encode())
    secret = key.rpartition("_")[2]
    assert not [value for value in row if secret in str(value)]
    with engine.connect() as connection:
        (shown,) = api_key_store.keys(connection)
    assert row.secret_sha256 not in map(str, shown.values()) and "secret_sha256" not in shown
    assert (shown["key_id"], shown["scopes"], shown["requests_per_min"]) == (key_id, ["inference", "feedback"], 60)


def test_a_key_lives_until_it_expires_or_is_revoked_and_in_its_project_only(engine: Engine, seed: Seed) -> None:
    forever, _ = make(engine)
    short, _ = make(engine, expires_at=NOW + timedelta(hours=1))
    gone, _ = make(engine)
    far, _ = make(engine, project="acme")
    with engine.begin() as connection:
        assert api_key_store.revoke(connection, gone, NOW)
    assert living(engine) == {forever, short}
    assert living(engine, at=NOW + timedelta(hours=1)) == {forever}
    assert living(engine, "acme") == {far}
    assert living(engine, "default", "acme") == {forever, short, far}


def test_a_project_revokes_its_own_keys_only_and_once(engine: Engine, seed: Seed) -> None:
    key_id, _ = make(engine)
    with engine.begin() as connection:
        assert not api_key_store.revoke(connection, key_id, NOW, "acme")
        assert not api_key_store.revoke(connection, "nosuch", NOW)
    assert living(engine) == {key_id}
    with engine.begin() as connection:
        assert api_key_store.revoke(connection, key_id, NOW, "default")
        assert api_key_store.revoke(connection, key_id, NOW + timedelta(hours=1), "default")
    assert seed.one(schema.api_keys, key_id).revoked_at == NOW


def test_whatever_happens_to_a_key_changes_the_state(engine: Engine, seed: Seed) -> None:
    def state() -> Any:
        with engine.connect() as connection:
            return api_key_store.state(connection)

    states = [state()]
    key_id, _ = make(engine)
    states.append(state())
    make(engine, created_at=NOW + timedelta(seconds=1))
    states.append(state())
    with engine.begin() as connection:
        api_key_store.revoke(connection, key_id, NOW)
    states.append(state())
    assert states[0] == (0, 0, None) and len(set(states)) == 4


def test_the_environments_key_is_kept_once_as_one_for_admins(engine: Engine, seed: Seed) -> None:
    for _ in range(2):
        api_key_store.ensure_bootstrap(engine, settings(), {BOOTSTRAP_VARIABLE: f" {FIRST}\n"})
    with engine.connect() as connection:
        (row,) = connection.execute(select(schema.api_keys))
    assert (row.project, row.name, row.scopes, row.expires_at) == ("default", "bootstrap", ["admin"], None)
    assert row.secret_sha256 == hash_of(FIRST.encode())


def test_the_environments_key_makes_the_home_project_where_no_stack_has(engine: Engine) -> None:
    api_key_store.ensure_bootstrap(engine, settings(project="acme"), {BOOTSTRAP_VARIABLE: FIRST})
    assert len(living(engine, "acme", at=datetime.now(UTC))) == 1


def test_the_environments_key_stays_revoked(engine: Engine, seed: Seed) -> None:
    environment = {BOOTSTRAP_VARIABLE: FIRST}
    api_key_store.ensure_bootstrap(engine, settings(), environment)
    (key_id,) = living(engine, at=datetime.now(UTC))
    with engine.begin() as connection:
        api_key_store.revoke(connection, str(key_id), NOW)
    api_key_store.ensure_bootstrap(engine, settings(), environment)
    assert living(engine, at=datetime.now(UTC)) == set()


def test_a_short_first_key_is_refused_and_not_told(engine: Engine, seed: Seed) -> None:
    with pytest.raises(SettingsError, match="openssl rand -hex 32") as caught:
        api_key_store.ensure_bootstrap(engine, settings(), {BOOTSTRAP_VARIABLE: FIRST[:31]})
    assert FIRST[:31] not in str(caught.value)
    assert living(engine) == set()


def test_off_loopback_nothing_starts_without_a_key(engine: Engine, seed: Seed) -> None:
    make(engine, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    make(engine, project="acme")  # of a project that these settings do not serve
    with pytest.raises(SettingsError, match=r"`whetstone keys create --project default .*--scope admin`") as caught:
        api_key_store.ensure_bootstrap(engine, settings("0.0.0.0"), {BOOTSTRAP_VARIABLE: ""})
    assert BOOTSTRAP_VARIABLE in str(caught.value) and "127.0.0.1" in str(caught.value)


def test_up_starts_nothing_off_loopback_without_a_key(tmp_path: Path) -> None:
    said: list[str] = []
    open_to_all = settings("0.0.0.0", data=tmp_path)
    with pytest.raises(SettingsError, match="whetstone keys create"), running(open_to_all, said.append):
        pass
    assert not list((tmp_path / "logs").glob("*"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_on_loopback_it_starts_without_and_says_nothing(
    engine: Engine, seed: Seed, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        api_key_store.ensure_bootstrap(engine, settings(host), {})
    assert caplog.records == []


def test_off_loopback_with_a_key_there_is_one_warning_about_tls(
    engine: Engine, seed: Seed, caplog: pytest.LogCaptureFixture
) -> None:
    make(engine)
    api_key_store.ensure_bootstrap(engine, settings("0.0.0.0"), {})
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "plain HTTP" in record.getMessage() and "TLS" in record.getMessage()


def test_the_first_key_is_no_setting_and_goes_into_no_dump() -> None:
    loaded = load(environment={BOOTSTRAP_VARIABLE: FIRST, "WHETSTONE_API_KEY": FIRST})
    dumped = [*as_environment(loaded).items(), loaded.model_dump_json()]
    assert not [one for one in dumped if FIRST in str(one) or BOOTSTRAP_VARIABLE in str(one)]
