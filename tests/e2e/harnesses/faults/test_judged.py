"""The proof of the judgements in its short form, and that it can fail: each ledger that does not agree is reported."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine

from benchmarks.fakes.judge import worth
from benchmarks.faults.judged.__main__ import Killer
from benchmarks.faults.judged.records import (
    SIZE,
    Attempt,
    Days,
    Group,
    Judgement,
    Ledger,
    Records,
    wrong_again,
    wrong_with,
)
from whetstone.stack.supervisor import RESTARTS

ROOT = Path(__file__).resolve().parents[4]

GROUPS, JUDGEMENTS, KILLS = 3, 2, 1
SLOTS = GROUPS * JUDGEMENTS
ALIKE = "g2"
"""The group whose attempts all have the same text."""


@pytest.mark.stack
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("groups", "kills"), [(10, 1), pytest.param(40, 2, marks=pytest.mark.long(part="harnesses"))])
def test_each_group_is_judged_once_though_their_worker_is_killed(groups: int, kills: int, vllm_url: str) -> None:
    command = [sys.executable, "-m", "benchmarks.faults.judged", "--groups", str(groups), "--kills", str(kills)]
    command += ["--vllm", vllm_url]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{groups} accepted of {groups}" in run.stdout and f"{groups} + {kills} kills" in run.stdout
    assert "it holds" in run.stdout


def attempt(group_id: str, place: int) -> Attempt:
    answer = "the same" if group_id == ALIKE else f"{group_id} says {place}"
    return Attempt(group_id, answer, worth({"content": answer}), "judge")


@pytest.fixture
def right() -> Ledger:
    """What SQL says when all is well: three groups, the last of them too alike, two judgements each."""
    names = [f"g{number}" for number in range(GROUPS)]
    states = {name: ("discarded", "judge_noise") if name == ALIKE else ("scored", None) for name in names}
    places = [(name, place) for name in names for place in range(JUDGEMENTS)]
    return Ledger(
        groups=[Group(name, "choices", *states[name], SIZE) for name in names],
        attempts=[attempt(name, place) for name in names for place in range(SIZE)],
        judgements=[Judgement(f"{n}-{p}", n, p, "reward", "accepted", 1, 100, 0.25) for n, p in places],
        days=Days(SLOTS, 0, 0, 100 * SLOTS, 0.25 * SLOTS),
    )


def faults(ledger: Ledger, calls: int = SLOTS) -> str:
    return "\n".join(wrong_with(ledger, GROUPS, JUDGEMENTS, calls, KILLS, 0.01))


def test_a_right_ledger_has_no_faults_and_a_kill_may_cost_a_call(right: Ledger) -> None:
    assert not faults(right)
    assert not faults(right, calls=SLOTS + KILLS)


def test_more_calls_than_judgements_and_kills_are_a_fault(right: Ledger) -> None:
    assert "7 calls for 6" not in faults(right, calls=SLOTS + KILLS)
    assert "8 calls for 6" in faults(right, calls=SLOTS + KILLS + 1)
    assert "received 5 calls, 6 are stored" in faults(right, calls=SLOTS - 1)


def changed(ledger: Ledger, what: str, number: int, **values: Any) -> Ledger:
    """The ledger with one changed row."""
    rows = list(getattr(ledger, what))
    rows[number] = replace(rows[number], **values)
    return replace(ledger, **{what: rows})


@pytest.mark.parametrize(("what", "number", "values", "fault"), [
    ("groups", 0, {"state": "closed"}, "g0 is closed (None), not scored"),
    ("groups", 0, {"state": "discarded", "reason": "judge_noise"}, "g0 is discarded"),
    ("groups", 2, {"state": "scored", "reason": None}, "g2 is scored (None), not discarded (judge_noise)"),
    ("groups", 1, {"formed_by": "prompt"}, "8 attempts by prompt"),
    ("groups", 1, {"size": 9}, "size 9"),
    ("attempts", 0, {"group_id": None}, "g0 is 7 attempts"),
    ("attempts", 0, {"reward": None}, "1 attempts have another reward than they are worth, one has None"),
    ("attempts", 0, {"reward": 0.123456}, "1 attempts have another reward than they are worth"),
    ("attempts", 0, {"source": "failure"}, "by failure"),
    ("judgements", 0, {"state": "waiting"}, "1 judgements were not accepted"),
    ("judgements", 0, {"place": 1}, "1 places have more than one judgement"),
    ("judgements", 0, {"place": 1}, "1 judgements are missing"),
    ("judgements", 0, {"place": 2}, "1 judgements of places that were not requested"),
    ("judgements", 0, {"purpose": "drift"}, "1 judgements of places that were not requested"),
    ("judgements", 0, {"group_id": "h"}, "1 judgements of places that were not requested"),
    ("judgements", 0, {"calls": 2}, "received 6 calls, 7 are stored"),
    ("judgements", 0, {"calls": 0}, "tells 6 calls (0 refused, 0 failed), not 5"),
    ("judgements", 0, {"tokens": 99}, "tells 600 tokens"),
    ("judgements", 0, {"cost_usd": None}, "for $1.25"),
])  # fmt: skip
def test_one_wrong_row_is_a_fault(right: Ledger, what: str, number: int, values: dict[str, Any], fault: str) -> None:
    assert fault in faults(changed(right, what, number, **values))


@pytest.mark.parametrize("values", [{"calls": 7}, {"refused": 1}, {"failed": 1}, {"tokens": 1}, {"cost_usd": 1.0}])
def test_days_with_other_sums_are_a_fault(right: Ledger, values: dict[str, Any]) -> None:
    assert "admin_judge_days" in faults(replace(right, days=replace(right.days, **values)))


def test_rows_that_are_missing_or_too_many_are_faults(right: Ledger) -> None:
    assert "2 groups, not 3" in faults(replace(right, groups=right.groups[:-1]))
    assert "23 attempts, not 24" in faults(replace(right, attempts=right.attempts[1:]))
    assert "1 judgements are missing" in faults(replace(right, judgements=right.judgements[1:]))
    twice = [*right.judgements, replace(right.judgements[0], judgement_id="another")]
    assert "1 places have more than one judgement" in faults(replace(right, judgements=twice))


GROUP_OF = {"f0": "g0", "f1": "g1", "f2": ALIKE}
BECAME = {"f0": "applied", "f1": "applied", "f2": "unused"}


def test_a_second_run_must_cost_nothing_and_change_nothing(right: Ledger) -> None:
    assert wrong_again(right, right, 0, GROUP_OF, BECAME) == []
    assert wrong_again(right, right, 1, GROUP_OF, BECAME) == ["the second run cost 1 calls"]
    other = changed(right, "attempts", 3, reward=0.5)
    assert wrong_again(right, other, 0, GROUP_OF, BECAME) == ["the second run changed attempts"]
    more = replace(right, days=replace(right.days, calls=SLOTS + 1))
    assert wrong_again(right, more, 0, GROUP_OF, BECAME) == ["the second run is counted in admin_judge_days"]


@pytest.mark.parametrize("became", [
    BECAME | {"f0": "waiting"}, BECAME | {"f0": "unused"}, BECAME | {"f2": "applied"}, {"f0": "applied", "f2": "unused"}
])  # fmt: skip
def test_feedback_of_the_second_run_must_be_applied_or_of_no_use(right: Ledger, became: dict[str, str]) -> None:
    (fault,) = wrong_again(right, right, 0, GROUP_OF, became)
    assert fault.startswith("1 feedbacks of the second run came to something else")


def test_the_queries_fit_the_tables(engine: Engine) -> None:
    records = Records(engine, "default")
    assert records.ledger() == Ledger([], [], [], Days(0, 0, 0, 0, 0.0))
    assert (records.states().total(), records.ranking_feedback()) == (0, {})


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process to kill."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def killer(folder: Path, pid: int, calls: int, kills: int = 3) -> tuple[Killer, SimpleNamespace]:
    """Of the worker with that process id, in a run of 8 judgements; and the judge, which has received so many calls."""
    addresses = folder / "up.json"
    addresses.write_text(f'{{"pids": {{"judge": {pid}}}}}')
    judge = SimpleNamespace(calls=calls)
    still = SimpleNamespace(random=lambda: 0.0)
    return Killer(addresses, judge, kills, 8, still), judge  # type: ignore[arg-type]


def test_only_a_worker_that_lives_and_has_judged_is_killed(worker: subprocess.Popen[bytes], tmp_path: Path) -> None:
    killing, judge = killer(tmp_path, worker.pid, calls=1)
    killing.look()
    assert (killing.hits, worker.poll()) == (0, None)
    judge.calls = 2
    killing.look()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert killing.hits == 1
    judge.calls = 8
    killing.look()
    assert worker.wait() == -signal.SIGKILL
    judge.calls = 9
    killing.look()
    assert killing.hits == 1, "neither a zombie nor a missing process can be hit"


def test_it_never_kills_as_often_as_the_supervisor_gives_up(
    worker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    killing, judge = killer(tmp_path, worker.pid, calls=8, kills=20)
    for calls in range(10, 30):
        judge.calls = calls
        killing.look()
    assert sent == [signal.SIGKILL] * (RESTARTS - 1) and killing.hits == RESTARTS - 1
