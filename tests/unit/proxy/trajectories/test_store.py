"""Look-ups of threads where the database fails or is silent: an app is served all the same, and soon."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from proxy.trajectories import store as module
from proxy.trajectories.store import ThreadTables


def asked(answers: list[Callable[[], str]]) -> list[str]:
    """What comes of look-ups one after the other, each of which is answered so."""
    tables = ThreadTables(create_engine("sqlite://"), "default")

    async def main() -> list[str]:
        return [await tables._answered(answer, "begins anew") for answer in answers]

    return asyncio.run(main())


def fails() -> str:
    raise OperationalError("SELECT", {}, Exception("gone"))


def test_a_database_that_fails_is_not_asked_again_at_once() -> None:
    assert asked([lambda: "found", fails, lambda: "found"]) == ["found", "begins anew", "begins anew"]


def test_it_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AWAY_S", -1.0)
    assert asked([fails, lambda: "found"]) == ["begins anew", "found"]


def test_a_database_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_UP_S", 0.01)
    answers = threading.Event()

    def silent() -> str:
        answers.wait(20)
        return "too late"

    def after() -> str:
        raise AssertionError("it was asked though it is silent")

    async def main() -> list[str]:
        tables = ThreadTables(create_engine("sqlite://"), "default")
        found = [await tables._answered(one, "begins anew") for one in (silent, after)]
        answers.set()
        return found

    assert asyncio.run(main()) == ["begins anew", "begins anew"]
