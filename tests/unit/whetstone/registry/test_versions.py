"""The ledger of versions: what each move changes, what it refuses, and what holds after any sequence of them."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, select

from migrations import schema
from tests.conftest import NOW, Seed
from whetstone.domain.lineage import lineage
from whetstone.registry import version_store, versions
from whetstone.registry.versions import LedgerError, Move

KEEP, MOST_PINNED = 2, 2
POLICY = "starter"


@dataclass
class Ledger:
    """One policy's versions, moved a minute apart, each move a transaction."""

    engine: Engine
    project: str = "default"
    now: datetime = NOW
    _minutes: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def move(self) -> Iterator[tuple[Connection, str, str]]:
        self.now = NOW + timedelta(minutes=next(self._minutes) + 1)
        with self.engine.begin() as connection:
            assert versions.lock(connection, self.project, POLICY) is not None
            yield connection, self.project, POLICY

    def candidate(self, parent: int | None = None, state: str = "candidate", **values: Any) -> int:
        """A step's version, of the live one if no parent is named."""
        with self.move() as at:
            number = version_store.take_number(*at)
            row = {"parent": versions.live_version(*at) if parent is None else parent, "state": state,
                   "served": state == "candidate", "adapter_path": f"/adapters/{number}"}  # fmt: skip
            row |= {"project": self.project, "id": f"{POLICY}@v{number}", "policy": POLICY, "version": number}
            at[0].execute(schema.policy_versions.insert().values(**row, created_at=self.now, **values))
        return number

    def promote(self, version: int, keep: int = KEEP, **values: Any) -> Move:
        with self.move() as at:
            return versions.make_live(*at, version, keep, self.now, **values)

    def step(self) -> int:
        """A step whose version goes live."""
        version = self.candidate()
        self.promote(version)
        return version

    def reject(self, version: int) -> None:
        with self.move() as at:
            versions.reject(*at, version, "worse", self.now, heldout_mean=0.25)

    def roll_back(self, to: int | None = None, reason: str = "it swears") -> Move:
        with self.move() as at:
            return versions.roll_back(*at, to, reason, KEEP, self.now)

    def pin(self, version: int, most: int = MOST_PINNED) -> None:
        with self.move() as at:
            versions.pin(*at, version, self.now, most)

    def unpin(self, version: int) -> None:
        with self.move() as at:
            versions.unpin(*at, version, KEEP, self.now)

    def want(self, version: int) -> Any:
        with self.move() as at:
            return versions.want(*at, version)

    def unwant(self, was: Any) -> None:
        with self.move() as at:
            versions.unwant(at[0], was, self.now)

    def load_fails(self, version: int) -> None:
        """Wanted, and not to be had."""
        self.unwant(self.want(version))

    def change(self, version: int, **values: Any) -> None:
        v = schema.policy_versions.c
        with self.engine.begin() as connection:
            is_it = (v.project == self.project, v.policy == POLICY, v.version == version)
            connection.execute(schema.policy_versions.update().where(*is_it).values(**values))

    def rows(self) -> dict[int, Any]:
        v = schema.policy_versions.c
        query = select(schema.policy_versions).where(v.project == self.project, v.policy == POLICY).order_by(v.version)
        with self.engine.connect() as connection:
            return {row.version: row for row in connection.execute(query)}

    def live(self) -> int:
        p = schema.policies.c
        with self.engine.connect() as connection:
            query = select(p.live_version).where(p.project == self.project, p.id == POLICY)
            return int(connection.execute(query).scalar_one())

    def states(self) -> dict[int, str]:
        return {number: row.state for number, row in self.rows().items()}

    def served(self) -> set[int]:
        return {number for number, row in self.rows().items() if row.served}


@pytest.fixture
def ledger(seed: Seed) -> Ledger:
    return Ledger(seed.engine)


def test_a_version_that_goes_live_retires_the_one_before(ledger: Ledger) -> None:
    version = ledger.candidate(tested_by="canary", canary_share=0.1)
    assert ledger.promote(version, probe_k3=0.5) == Move(before=0, live=1)
    row = ledger.rows()[1]
    assert (row.state, row.promoted_at, row.tested_by, row.canary_share, row.probe_k3) == (
        "live", ledger.now, None, None, 0.5
    )  # fmt: skip
    assert ledger.states() == {0: "retired", 1: "live"} and ledger.live() == 1


def test_only_a_version_that_follows_its_parent_is_watched_and_only_while_it_is_live(ledger: Ledger) -> None:
    first, second = ledger.step(), ledger.step()
    first_over, second_over = (ledger.rows()[number].watched_at for number in (first, second))
    assert first_over == ledger.rows()[second].promoted_at and second_over is None
    ledger.roll_back()
    assert (ledger.rows()[first].state, ledger.rows()[first].watched_at) == ("live", first_over)
    other = ledger.candidate(parent=0, state="retired")
    ledger.promote(other)
    assert ledger.rows()[other].watched_at == ledger.rows()[other].promoted_at
    ledger.roll_back()
    assert ledger.rows()[0].watched_at is not None


def test_a_version_gone_back_to_before_its_own_watch_was_over_is_not_watched_anew(ledger: Ledger) -> None:
    first = ledger.step()
    ledger.promote(ledger.candidate(parent=0, state="retired"))
    ledger.promote(0)
    ledger.promote(first)
    assert ledger.rows()[first].watched_at < ledger.now


def test_the_newest_retired_versions_stay_loaded_and_the_base_model_always(ledger: Ledger) -> None:
    for _ in range(5):
        ledger.step()
    assert ledger.served() == {0, 3, 4, 5}
    dropped = ledger.rows()[2]
    assert dropped.state == "retired" and dropped.unserved_at == ledger.now


def test_newest_is_what_was_live_last_not_what_has_the_highest_number(ledger: Ledger) -> None:
    for _ in range(4):
        ledger.step()
    ledger.promote(1)
    assert ledger.served() == {0, 1, 3, 4}
    ledger.promote(3)
    assert ledger.served() == {0, 1, 3, 4}
    row = ledger.rows()[1]
    assert (row.state, row.unserved_at) == ("retired", None)


def test_the_live_version_promoted_again_stays_as_it_is(ledger: Ledger) -> None:
    ledger.step()
    before = ledger.rows()
    assert ledger.promote(1) == Move(before=1, live=1)
    assert ledger.rows() == before


def test_a_rejected_version_can_be_made_live_by_hand(ledger: Ledger) -> None:
    ledger.reject(ledger.candidate())
    row = ledger.rows()[1]
    assert (row.state, row.reason, row.served, row.heldout_mean) == ("rejected", "worse", False, 0.25)
    ledger.promote(1)
    row = ledger.rows()[1]
    assert (row.state, row.reason, row.served, row.unserved_at) == ("live", None, True, None)


def test_a_rejected_candidate_is_in_no_test_any_more(ledger: Ledger) -> None:
    version = ledger.candidate(tested_by="canary", canary_share=0.1)
    ledger.reject(version)
    row = ledger.rows()[version]
    assert (row.tested_by, row.canary_share, row.unserved_at) == (None, None, ledger.now)


def test_the_live_version_is_not_rejected_but_rolled_back(ledger: Ledger) -> None:
    ledger.step()
    with pytest.raises(LedgerError, match="version 1 of starter is live; roll it back instead"):
        ledger.reject(1)


def test_a_rollback_goes_to_the_parent_and_rejects_what_came_of_it(ledger: Ledger) -> None:
    ledger.step()
    ledger.step()
    candidate = ledger.candidate()
    assert ledger.roll_back() == Move(before=2, live=1, rejected=(2, candidate))
    assert ledger.states() == {0: "retired", 1: "live", 2: "rejected", 3: "rejected"}
    assert ledger.rows()[2].reason == "rolled back to version 1: it swears"
    assert ledger.served() == {0, 1}


def test_a_rollback_along_the_line_rejects_all_that_descends_from_the_first_left_behind(ledger: Ledger) -> None:
    for _ in range(4):
        ledger.step()
    ledger.pin(3)
    assert ledger.roll_back(to=1) == Move(before=4, live=1, rejected=(2, 3, 4))
    assert ledger.rows()[3].pinned_at is None


def test_the_base_model_can_be_gone_back_to_and_nothing_is_before_it(ledger: Ledger) -> None:
    ledger.step()
    assert ledger.roll_back(to=0).live == 0
    with pytest.raises(LedgerError, match="version 0 of starter has nothing before it to go back to"):
        ledger.roll_back()


def test_a_version_of_another_line_is_promoted_not_gone_back_to(ledger: Ledger) -> None:
    ledger.step()
    ledger.roll_back()
    ledger.step()
    ledger.step()
    with pytest.raises(LedgerError, match=r"does not descend from version 1; it can go back to 2, 0\. Any other"):
        ledger.roll_back(to=1)
    with pytest.raises(LedgerError, match="does not descend from version 9"):
        ledger.roll_back(to=9)
    with pytest.raises(LedgerError, match="does not descend from version 3"):
        ledger.roll_back(to=3)


def test_a_rollback_passes_over_what_was_rejected_or_removed(ledger: Ledger) -> None:
    for _ in range(4):
        ledger.step()
    ledger.roll_back(to=1)
    ledger.promote(4)  # by hand, though its parents 2 and 3 are rejected
    assert ledger.roll_back().live == 1
    ledger.promote(4)
    ledger.change(1, removed_at=NOW)
    assert ledger.roll_back().live == 0


def test_a_removed_adapter_is_not_made_live_whoever_asks(ledger: Ledger) -> None:
    ledger.step()
    ledger.step()
    ledger.change(1, removed_at=NOW)
    moves: list[Callable[[], object]] = [
        lambda: ledger.promote(1),
        lambda: ledger.roll_back(to=1),
        lambda: ledger.pin(1),
        lambda: ledger.want(1),
    ]
    for move in moves:
        with pytest.raises(LedgerError, match=r"the adapter of starter@v1 was removed at 2026-01-01 12:00 UTC"):
            move()
    assert ledger.live() == 2


def test_a_version_that_does_not_exist_is_named(ledger: Ledger) -> None:
    for move in (ledger.promote, ledger.pin, ledger.unpin, ledger.want, ledger.reject):
        with pytest.raises(LedgerError, match="starter has no version 7; `whetstone versions starter` lists them"):
            move(7)


def test_a_candidate_whose_parent_was_rolled_back_meanwhile_does_not_go_live(ledger: Ledger) -> None:
    ledger.step()
    ledger.step()
    ledger.roll_back()
    late = ledger.candidate(parent=2)  # its step began before the rollback
    with pytest.raises(LedgerError, match="version 3 of starter was made from version 2, but 1 is live now"):
        ledger.promote(late)
    assert ledger.live() == 1


def test_a_candidate_is_over_when_a_version_goes_live_that_it_was_not_made_from(ledger: Ledger) -> None:
    ledger.step()
    ledger.step()
    candidate = ledger.candidate()
    assert ledger.promote(1) == Move(before=2, live=1, rejected=(candidate,))
    assert ledger.rows()[candidate].reason == "version 1 went live, which it was not made from"


def test_a_pinned_version_stays_loaded_however_old_and_beside_the_kept_ones(ledger: Ledger) -> None:
    ledger.step()
    ledger.pin(1)
    for _ in range(4):
        ledger.step()
    assert ledger.served() == {0, 1, 3, 4, 5}
    ledger.unpin(1)
    assert ledger.served() == {0, 3, 4, 5}


def test_a_version_that_vllm_had_dropped_is_loaded_again_when_it_is_pinned(ledger: Ledger) -> None:
    for _ in range(4):
        ledger.step()
    assert 1 not in ledger.served()
    ledger.pin(1)
    row = ledger.rows()[1]
    assert (row.served, row.unserved_at, row.pinned_at) == (True, None, ledger.now)


def test_pinned_again_it_is_pinned_since_the_first_time(ledger: Ledger) -> None:
    ledger.step()
    ledger.pin(1)
    since = ledger.now
    ledger.pin(1)
    assert ledger.rows()[1].pinned_at == since < ledger.now


def test_only_so_many_are_pinned_as_vllm_has_room_for(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.step()
    ledger.pin(0)  # needs no room
    ledger.pin(1, most=2)
    ledger.pin(2, most=2)
    with pytest.raises(LedgerError, match=r"room for 2 pinned .* pinned are: starter@v1, starter@v2; unpin one"):
        ledger.pin(3, most=2)
    ledger.pin(2, most=2)  # is one of them
    ledger.unpin(1)
    ledger.pin(3, most=2)


@pytest.mark.parametrize("state", ["candidate", "rejected"])
def test_only_what_has_been_live_can_be_pinned(ledger: Ledger, state: str) -> None:
    version = ledger.candidate(state=state)
    with pytest.raises(LedgerError, match=f"version 1 of starter is {state}; promote it"):
        ledger.pin(version)


def test_what_was_wanted_and_could_not_be_loaded_is_as_it_was(ledger: Ledger) -> None:
    for _ in range(4):
        ledger.step()
    ledger.roll_back()
    for version in (1, 4):  # retired, and rejected
        before = ledger.rows()[version]
        was = ledger.want(version)
        assert (version in ledger.served(), ledger.states()[version]) == (True, before.state)
        ledger.unwant(was)
        row = ledger.rows()[version]
        assert (row.state, row.served, row.reason) == (before.state, before.served, before.reason)


def test_what_has_gone_live_or_was_pinned_meanwhile_is_not_taken_back(ledger: Ledger) -> None:
    for _ in range(5):
        ledger.step()
    wanted = {version: ledger.want(version) for version in (1, 2)}
    ledger.promote(1)
    ledger.pin(2)
    for was in wanted.values():
        ledger.unwant(was)
    assert ledger.served() >= {1, 2} and ledger.live() == 1


def test_what_was_loaded_anyway_stays_loaded(ledger: Ledger) -> None:
    ledger.step()
    ledger.step()
    ledger.load_fails(1)
    assert 1 in ledger.served()


def test_a_policy_that_does_not_exist_cannot_be_locked(seed: Seed) -> None:
    with seed.engine.begin() as connection:
        assert versions.lock(connection, "default", "nobody") is None


def test_every_decision_is_kept_with_its_numbers(ledger: Ledger) -> None:
    with ledger.move() as at:
        told: dict[str, Any] = {"test": "canary", "decision": "reject", "against": 0, "reason": "worse"}
        told["figures"] = {"loss": 0.125, "samples": 40}
        versions.decide(*at, 1, now=ledger.now, **told)
    with ledger.move() as at:
        versions.decide(*at, 1, test="hand", decision="promote", now=ledger.now)
        last, first = version_store.decisions(*at)
    assert (last["test"], last["figures"], last["reason"], last["created_at"]) == ("hand", None, None, ledger.now)
    assert first == told | {"version": 1, "created_at": ledger.now - timedelta(minutes=1)}


def test_a_version_that_no_step_made_waits_to_be_promoted(ledger: Ledger, tmp_path: Any) -> None:
    ledger.step()
    with ledger.move() as at:
        number = version_store.take_number(*at)
        told = {"folder": tmp_path, "manifest_sha256": "ab", "origin": "starter@v1", "now": ledger.now}
        version_store.add(*at, number, **told)
        shown = version_store.versions(*at)[0]
    assert (number, ledger.live()) == (2, 1)
    assert (shown["version"], shown["parent"], shown["state"], shown["served"], shown["origin"]) == (
        2, 0, "retired", False, "starter@v1"
    )  # fmt: skip
    ledger.promote(2)
    assert ledger.roll_back().live == 0


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ("step", "fails", "late", "promote", "back", "back_to", "pin", "unpin", "load_fails", "remove")
        ),
        st.integers(0, 9),
    ),
    max_size=25,
)


@examples(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES)
def test_after_any_moves_one_version_is_live_and_what_must_be_loaded_is(
    seed: Seed, moves: list[tuple[str, int]], projects: Iterator[str]
) -> None:
    ledger = Ledger(seed.engine, next(projects))
    seed.project(ledger.project)
    for move, version in moves:
        before, live = ledger.rows(), ledger.live()
        try:
            _do(ledger, move, version)
        except LedgerError:
            event(f"{move} refused")
            assert (ledger.rows(), ledger.live()) == (before, live)
        _check(ledger, move, before)


@pytest.fixture(scope="module")
def projects() -> Iterator[str]:
    """A name for each example: they share one database."""
    return (f"project-{number}" for number in itertools.count())


def _do(ledger: Ledger, move: str, version: int) -> None:
    match move:
        case "step":
            ledger.step()
        case "fails":
            ledger.reject(ledger.candidate())
        case "late":  # the step of a version that may no longer be live
            if version in ledger.rows():
                _late(ledger, ledger.candidate(parent=version))
        case "promote":
            ledger.promote(version)
        case "back":
            ledger.roll_back()
        case "back_to":
            ledger.roll_back(to=version)
        case "pin":
            ledger.pin(version)
        case "unpin":
            ledger.unpin(version)
        case "load_fails":
            ledger.load_fails(version)
        case "remove":  # as the trainer's retention does, of what nothing needs
            row = ledger.rows().get(version)
            if row is not None and version > 0 and not row.served:
                ledger.change(version, removed_at=NOW)


def _late(ledger: Ledger, candidate: int) -> None:
    try:
        ledger.promote(candidate)
    except LedgerError:
        ledger.reject(candidate)


def _check(ledger: Ledger, move: str, before: dict[int, Any]) -> None:
    rows, live = ledger.rows(), ledger.live()
    assert [number for number, row in rows.items() if row.state == "live"] == [live]
    must = {live, 0} | {number for number, row in rows.items() if row.pinned_at is not None}
    assert ledger.served() >= must
    assert not any(row.served or row.pinned_at for row in rows.values() if row.state == "rejected")
    assert not any(row.removed_at for row in rows.values() if row.served)
    kept = [row for number, row in rows.items() if row.served and number not in must and row.state == "retired"]
    assert len(kept) <= KEEP
    assert all((row.unserved_at is None) for row in rows.values() if row.served)
    parents = {number: row.parent for number, row in rows.items()}
    assert all(row.parent == live for row in rows.values() if row.state == "candidate")
    if move in ("back", "back_to") and any(row.state == "live" and row.version != live for row in before.values()):
        (left,) = [number for number, row in before.items() if row.state == "live"]
        assert live in lineage(left, parents)
        assert not any(
            row.state in ("live", "retired", "candidate")
            for number, row in rows.items()
            if left in lineage(number, parents)
        )
