"""Who asks: keys in memory, against both databases; the same answer to whatever is wrong with one."""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from migrations import schema
from proxy.admission.api_key_store import KeyTables
from proxy.admission.api_keys import LONGEST_CACHED, Keys, _hash_of
from proxy.errors import MissingScope, NoKey, ProxyError, WrongKey
from tests.conftest import NOW, Seed
from tests.unit.whetstone.domain.test_api_keys import make
from whetstone.domain.api_keys import Principal, new_key
from whetstone.registry import api_key_store

SECOND = timedelta(seconds=1)


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now.timestamp()


class Counted:
    """A table that counts what is asked of it, and may be away."""

    def __init__(self, table: KeyTables) -> None:
        self._table = table
        self.asked: list[str] = []
        self.away: set[str] = set()

    def state(self) -> Any:
        self._ask("state")
        return self._table.state()

    def living(self, now: datetime) -> Any:
        self._ask("living")
        return self._table.living(now)

    def note_used(self, minutes: Mapping[tuple[str, str], datetime]) -> None:
        self._ask("note_used")
        self._table.note_used(minutes)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.away:
            raise OperationalError(what, None, Exception("away"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(engine: Engine, seed: Seed) -> Counted:
    return Counted(KeyTables(engine, ["default", "acme"]))


@pytest.fixture
def keys(table: Counted, clock: Clock) -> Keys:
    return Keys(table, "default", on_loopback=True, now_s=clock)


def refresh(keys: Keys) -> None:
    asyncio.run(keys.refresh())


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def error(keys: Keys, headers: dict[bytes, bytes]) -> ProxyError:
    with pytest.raises(ProxyError) as caught:
        keys.find(headers)
    return caught.value


def test_where_no_key_was_ever_made_this_machine_needs_none(keys: Keys) -> None:
    refresh(keys)
    assert not keys.needed
    for headers in ({}, bearer("sk-whatever-clients-send")):
        principal = keys.admit(headers, "admin")
        assert (principal.project, principal.key_id) == ("default", None)


def test_until_the_keys_were_read_nobody_comes_in(keys: Keys) -> None:
    assert keys.needed
    assert isinstance(error(keys, {}), NoKey)


def test_off_loopback_everybody_needs_one(table: Counted, clock: Clock) -> None:
    keys = Keys(table, "default", on_loopback=False, now_s=clock)
    refresh(keys)
    assert keys.needed and isinstance(error(keys, {}), NoKey)


def test_once_a_key_was_made_everybody_needs_one_even_if_it_was_revoked(engine: Engine, keys: Keys) -> None:
    refresh(keys)
    key_id, key = make(engine)
    refresh(keys)
    assert keys.needed and keys.find(bearer(key)).key_id == key_id
    with engine.begin() as connection:
        api_key_store.revoke(connection, key_id, NOW)
    refresh(keys)
    assert keys.needed and isinstance(error(keys, bearer(key)), WrongKey)


def test_a_key_of_a_project_that_is_not_served_here_closes_the_door_too(engine: Engine, keys: Keys) -> None:
    _, key = make(engine, project="stranger")
    refresh(keys)
    assert keys.needed and isinstance(error(keys, bearer(key)), WrongKey)


@pytest.mark.parametrize(
    "form",
    [
        (b"authorization", b"Bearer %s"),
        (b"authorization", b"bearer  %s "),
        (b"x-api-key", b"%s"),
    ],
)
def test_a_key_is_taken_as_openais_and_anthropics_clients_send_it(
    engine: Engine, keys: Keys, form: tuple[bytes, bytes]
) -> None:
    key_id, key = make(engine, project="acme", scopes=["feedback"], requests_per_min=5, tokens_per_min=7)
    refresh(keys)
    name, value = form
    assert keys.find({name: value % key.encode()}) == Principal("acme", key_id, frozenset({"feedback"}), 5, 7, "app")


def test_beside_a_bearer_the_other_header_counts_nothing(engine: Engine, keys: Keys) -> None:
    _, key = make(engine)
    refresh(keys)
    assert isinstance(error(keys, bearer("wrong") | {b"x-api-key": key.encode()}), WrongKey)
    assert keys.find({b"authorization": b"Basic dTpw", b"x-api-key": key.encode()})


def test_what_is_sent_at_length_with_a_key_is_not_kept_in_memory(engine: Engine, keys: Keys) -> None:
    key_id, key = make(engine)
    refresh(keys)
    kept = _hash_of.cache_info().currsize
    long = {b"authorization": b"Bearer " + key.encode() + b" " * LONGEST_CACHED}
    assert keys.find(long).key_id == key_id
    assert isinstance(error(keys, {b"x-api-key": b"x" * (LONGEST_CACHED + 1)}), WrongKey)
    assert _hash_of.cache_info().currsize == kept


def test_a_key_that_is_revoked_is_not_kept_in_memory_either(engine: Engine, keys: Keys) -> None:
    key_id, key = make(engine)
    refresh(keys)
    assert keys.find(bearer(key)).key_id == key_id
    assert _hash_of.cache_info().currsize
    with engine.begin() as connection:
        api_key_store.revoke(connection, key_id, NOW)
    refresh(keys)
    assert _hash_of.cache_info().currsize == 0


@pytest.mark.parametrize(
    "headers", [{}, {b"authorization": b"Bearer "}, {b"authorization": b"Basic dTpw"}, {b"x-api-key": b" "}]
)
def test_a_missing_key_is_told_where_keys_come_from(engine: Engine, keys: Keys, headers: dict[bytes, bytes]) -> None:
    make(engine)
    refresh(keys)
    refused = error(keys, headers)
    assert (refused.status, refused.code) == (401, "missing_api_key") and "whetstone keys create" in refused.message
    assert dict(refused.headers())[b"www-authenticate"] == b"Bearer"
    assert keys.find_or_none(headers) is None


def test_whatever_is_wrong_with_a_key_is_answered_the_same(engine: Engine, keys: Keys, clock: Clock) -> None:
    revoked_id, revoked = make(engine)
    _, expired = make(engine, expires_at=NOW - SECOND)
    _, expiring = make(engine, expires_at=NOW + SECOND)
    _, strangers = make(engine, project="stranger")
    _, good = make(engine)
    with engine.begin() as connection:
        api_key_store.revoke(connection, revoked_id, NOW)
    refresh(keys)
    assert keys.find(bearer(expiring))
    clock.now += SECOND
    presented = [revoked, expired, expiring, strangers, new_key()[1], good[:-1], good + "x", good.upper(), "x", "\xff"]
    told = {
        (type(one), one.status, one.body(), tuple(one.headers()))
        for one in (error(keys, bearer(key)) for key in presented)
    }
    assert len(told) == 1
    (refused,) = {error(keys, bearer("x"))}
    assert (refused.status, refused.code) == (401, "invalid_api_key") and "whetstone keys create" in refused.message
    assert keys.find(bearer(good))


def test_a_key_without_the_scope_is_told_which_it_needs(engine: Engine, keys: Keys) -> None:
    key_id, key = make(engine, scopes=["feedback"])
    refresh(keys)
    assert keys.admit(bearer(key), "feedback").key_id == key_id
    with pytest.raises(MissingScope, match=rf"the scope inference; the key {key_id} has: feedback") as caught:
        keys.admit(bearer(key), "inference")
    assert (caught.value.status, caught.value.code) == (403, "missing_scope")
    assert key not in caught.value.message


def test_keys_that_stay_as_they_are_cost_one_small_query(engine: Engine, keys: Keys, table: Counted) -> None:
    make(engine)
    for _ in range(3):
        refresh(keys)
    assert table.asked == ["state", "living", "state", "state"]


def test_while_the_database_is_away_the_last_keys_stay_and_end_at_their_time(
    engine: Engine, keys: Keys, table: Counted, clock: Clock
) -> None:
    _, key = make(engine)
    _, short = make(engine, expires_at=NOW + SECOND)
    refresh(keys)
    table.away = {"state", "living", "note_used"}
    with pytest.raises(OperationalError):
        refresh(keys)
    assert keys.find(bearer(key)) and keys.find(bearer(short))
    clock.now += SECOND
    assert keys.find(bearer(key)) and isinstance(error(keys, bearer(short)), WrongKey)


def test_the_last_use_is_written_to_the_minute_and_once_in_it(
    engine: Engine, keys: Keys, table: Counted, clock: Clock, seed: Seed
) -> None:
    key_id, key = make(engine)
    unused, _ = make(engine)
    refresh(keys)
    clock.now = NOW.replace(second=42)
    for _ in range(3):
        keys.find(bearer(key))
        refresh(keys)
    assert table.asked.count("note_used") == 1
    clock.now += 20 * SECOND
    keys.find(bearer(key))
    refresh(keys)
    assert table.asked.count("note_used") == 2
    assert seed.one(schema.api_keys, key_id).last_used_at == NOW + timedelta(minutes=1)
    assert seed.one(schema.api_keys, unused).last_used_at is None


def test_of_two_proxies_the_later_use_stays(engine: Engine, table: Counted, seed: Seed) -> None:
    key_id, _ = make(engine)
    for minute in (2, 1):
        table.note_used({("default", key_id): NOW + timedelta(minutes=minute), ("acme", key_id): NOW})
    assert seed.one(schema.api_keys, key_id).last_used_at == NOW + timedelta(minutes=2)


def test_a_last_use_that_cannot_be_written_disturbs_nobody(engine: Engine, keys: Keys, table: Counted) -> None:
    _, key = make(engine)
    refresh(keys)
    table.away = {"note_used"}
    keys.find(bearer(key))
    refresh(keys)
    assert table.asked[-1] == "note_used" and keys.find(bearer(key))


def test_where_everybody_may_ask_a_good_key_is_known_all_the_same(engine: Engine, keys: Keys) -> None:
    key_id, key = make(engine)
    refresh(keys)
    principal = keys.find_or_none(bearer(key))
    assert principal is not None and principal.key_id == key_id
    assert keys.find_or_none(bearer("wrong")) is None
