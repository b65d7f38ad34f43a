"""The order of a sweep, with what it calls written down."""

import threading

import pytest
from sqlalchemy.exc import OperationalError

from trainer.errors import AdapterMismatch
from trainer.step.schedule import rounds
from whetstone.registry.adapters import AdapterDamaged
from whetstone.vllm.client import VllmDown


class Worker:
    """Policies with so many steps due each."""

    def __init__(self, **due: int) -> None:
        self.due = due
        self.calls: list[str] = []
        self.fails: dict[str, Exception] = {}

    def sweep(self) -> list[str]:
        rounds(
            sorted(self.due), lambda policy: self.calls.append(f"tests of {policy}"), lambda: self.calls.append("tidy"),
            self.take,
        )  # fmt: skip
        return self.calls

    def take(self, policy: str) -> bool:
        if policy in self.fails:
            raise self.fails[policy]
        self.due[policy] -= 1
        if self.due[policy] >= 0:
            self.calls.append(f"step of {policy}")
        return self.due[policy] >= 0


def test_a_policy_with_many_steps_lets_the_tests_and_the_others_have_their_turn() -> None:
    between = ["tests of a", "tests of b", "tidy"]
    told = [*between, "step of a", "step of b", *between, "step of a", *between]
    assert Worker(a=2, b=1).sweep() == told


@pytest.mark.parametrize(
    "error", [AdapterMismatch("rank 4"), AdapterDamaged("no file"), VllmDown("away"), KeyError("x")]
)
def test_a_policy_whose_step_cannot_be_taken_does_not_keep_the_others_waiting(error: Exception) -> None:
    worker = Worker(a=1, b=1)
    worker.fails["a"] = error
    assert "step of b" in worker.sweep()


def test_a_database_that_is_away_ends_the_sweep() -> None:
    worker = Worker(a=1, b=1)
    worker.fails["a"] = OperationalError("SELECT", None, Exception("away"))
    with pytest.raises(OperationalError):
        worker.sweep()
    assert worker.calls == ["tests of a", "tests of b", "tidy"]


def test_steps_of_several_policies_are_taken_at_the_same_time() -> None:
    both, taken = threading.Barrier(2, timeout=30), set()

    def take(policy: str) -> bool:
        if policy in taken:
            return False
        both.wait()  # breaks where one would be taken after the other
        taken.add(policy)
        return True

    rounds(["a", "b"], lambda _: None, lambda: None, take, at_once=2)
    assert taken == {"a", "b"} and not both.broken


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_error_of_one_policy_stops_no_other_however_many_are_taken_at_once(at_once: int) -> None:
    taken = []

    def take(policy: str) -> bool:
        if policy == "a":
            raise KeyError("x")
        taken.append(policy)
        return False

    rounds(["a", "b"], lambda _: None, lambda: None, take, at_once)
    assert taken == ["b"]


def test_a_database_that_is_away_ends_a_sweep_of_several_at_once() -> None:
    def take(policy: str) -> bool:
        raise OperationalError("SELECT", None, Exception("away"))

    with pytest.raises(OperationalError):
        rounds(["a", "b"], lambda _: None, lambda: None, take, at_once=2)
