"""The soak in its short form, and that it can fail: what its ledgers, its memory curve and its log tell."""

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fakes.vllm import Arrival, Fate, plan_of
from benchmarks.kit.process import WHEN_QUIET, open_files, too_many, unhandled
from benchmarks.soak.__main__ import MOST_GROWTH_BYTES, flat
from benchmarks.soak.apps import DIALECTS, MOMENTS, WHY_REFUSED, Ask, ReceivedAnswer, ask_of, wrong_with
from benchmarks.soak.proxy_under_load import Sample
from benchmarks.soak.records import Record, wrong_with_records
from benchmarks.soak.steady import files_not_flat, memory_not_flat

ROOT = Path(__file__).resolve().parents[3]

SEED, REQUESTS = 2, 1000
CALL, COMPLETION = "call", "completion"


def request_of(fate: Fate = Fate.NORMAL) -> Ask:
    """A streamed request of that fate, whose app stays and receives its first words."""
    plans = (plan_of(SEED, number, streamed=True) for number in range(10_000))
    plan = next(plan for plan in plans if plan.fate is fate and plan.cut > 3 and plan.words[0])
    return Ask(plan.number, DIALECTS["chat"], plan, None, None, 0.0, 0, {})


def received(ask: Ask, tokens: int) -> ReceivedAnswer:
    """The answer of an app that received so many tokens, and the end if those are all."""
    events = [json.dumps({"choices": [{"delta": {"content": word}}]}) for word in ask.plan.words[:tokens]]
    if tokens == len(ask.plan.words):
        events.append("[DONE]")
    body = "".join(f"data: {event}\n\n" for event in events)
    return ReceivedAnswer(ask, 200, {"x-completion-id": COMPLETION}, body.encode())


def arrived(ask: Ask) -> list[Arrival]:
    return [Arrival(CALL, ask.plan)]


def recorded(ask: Ask, tokens: int, status: str = "complete") -> Record:
    """The record of so many tokens."""
    plan = ask.plan
    return Record(
        number=plan.number,
        completion_id=COMPLETION,
        call_id=CALL,
        upstream_id=f"chatcmpl-{CALL}",
        status=status,
        follows=None,
        text="".join(plan.words[:tokens]),
        prompt_token_ids=plan.prompt_ids,
        token_ids=plan.token_ids[:tokens],
        logprobs=plan.logprobs[:tokens],
    )


@pytest.mark.slow
def test_the_proxy_holds() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--requests", str(REQUESTS), "--seed", str(SEED)]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert soak.returncode == 0, soak.stdout + soak.stderr[-2000:]
    assert "it holds" in soak.stdout


def test_the_short_form_meets_every_fault() -> None:
    asks = [ask_of(SEED, number, list(DIALECTS.values())) for number in range(REQUESTS)]
    assert {ask.plan.fate for ask in asks} == set(Fate)
    assert {ask.leaves for ask in asks} == {None, *MOMENTS}
    assert {ask.refused for ask in asks} == {None, *WHY_REFUSED}


def test_ledgers_that_agree_are_no_fault() -> None:
    ask = request_of()
    seen = received(ask, len(ask.plan.words))
    assert wrong_with(seen) is None
    assert wrong_with_records(seen, arrived(ask), [recorded(ask, len(ask.plan.words))]) is None


def test_a_missing_record_is_a_fault() -> None:
    ask = request_of()
    assert wrong_with_records(received(ask, len(ask.plan.words)), arrived(ask), []) == "no record"


def test_a_missing_record_is_a_fault_though_the_app_hung_up() -> None:
    ask = replace(request_of(), leaves="midway")
    seen = replace(received(ask, 2), left=True)
    assert wrong_with_records(seen, arrived(ask), []) == "no record"
    assert wrong_with_records(seen, arrived(ask), [recorded(ask, 3, "aborted")]) is None


def test_a_record_of_less_than_the_app_received_is_a_fault() -> None:
    ask = replace(request_of(), leaves="midway")
    seen = replace(received(ask, 2), left=True)
    fault = wrong_with_records(seen, arrived(ask), [recorded(ask, 0, "aborted")])
    assert fault is not None and "0 are recorded" in fault


def test_a_record_of_half_an_answer_that_went_out_whole_is_a_fault() -> None:
    ask = request_of()
    tokens = len(ask.plan.words)
    fault = wrong_with_records(received(ask, tokens), arrived(ask), [recorded(ask, tokens - 1)])
    assert fault == f"{tokens - 1} of {tokens} sampled tokens"


def test_a_record_of_another_apps_answer_is_a_fault() -> None:
    ask = request_of()
    tokens = len(ask.plan.words)
    record = recorded(ask, tokens)
    swapped = replace(record, logprobs=[logprob - 1 for logprob in record.logprobs or []])
    fault = wrong_with_records(received(ask, tokens), arrived(ask), [swapped])
    assert fault == "other ids or logprobs than the model's"


def test_two_records_of_one_request_are_a_fault() -> None:
    ask = request_of()
    record = recorded(ask, len(ask.plan.words))
    assert wrong_with_records(received(ask, len(ask.plan.words)), arrived(ask), [record, record]) is not None


def test_an_answer_that_broke_off_but_is_recorded_as_complete_is_a_fault() -> None:
    ask = request_of(Fate.DIES)
    seen = replace(received(ask, ask.plan.cut), broken=True)
    assert wrong_with(seen) is None
    assert wrong_with_records(seen, arrived(ask), [recorded(ask, ask.plan.cut, "error")]) is None
    fault = wrong_with_records(seen, arrived(ask), [recorded(ask, ask.plan.cut)])
    assert fault == "complete, not error"


def test_a_request_that_should_be_refused_and_was_served_is_a_fault() -> None:
    ask = replace(request_of(), refused="field")
    seen = received(ask, len(ask.plan.words))
    assert wrong_with(seen) == "400 was due, came 200"
    assert wrong_with_records(seen, arrived(ask), [recorded(ask, 1)]) is not None


def test_an_answer_that_is_not_the_models_text_is_a_fault() -> None:
    ask = request_of()
    seen = received(ask, len(ask.plan.words))
    assert wrong_with(replace(seen, body=b'data: {"choices":[{"delta":{"content":"lies"}}]}\n\n')) is not None


def test_a_server_error_of_the_proxys_own_is_a_fault() -> None:
    seen = ReceivedAnswer(request_of(Fate.GARBAGE), 500, {}, b"Internal Server Error")
    assert wrong_with(seen) == "503 or an answer that breaks off was due, came 500, whole: True"


@pytest.mark.parametrize(("grown_bytes", "is_flat"), [(0, True), (2 * MOST_GROWTH_BYTES, False)])
def test_memory_that_grows_in_the_last_quarter_is_not_flat(grown_bytes: int, is_flat: bool) -> None:
    sizes = [90 * 2**20 + grown_bytes * (answered >= 75) for answered in range(101)]
    samples = [Sample(place / 100, place, place, size, Counter(), 0, 0) for place, size in enumerate(sizes)]
    assert flat(samples)[2] is is_flat


def test_an_unhandled_exception_in_the_log_is_a_fault() -> None:
    assert unhandled("INFO the app hung up\n") == []
    log = "ERROR: Exception in ASGI application\nTraceback (most recent call last):\n  KeyError: 'choices'\n"
    assert "KeyError: 'choices'" in unhandled(log)[0]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[str, str, sqlite3.Connection, socket.socket]]:
    """One of each kind: this process as a proxy that has an app and a model server. Its address, the model server's,
    its connection to the database, and the app's end of its connection."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in listeners]
        stack.enter_context(socket.create_connection(("127.0.0.1", ports[1])))
        app = stack.enter_context(socket.create_connection(("127.0.0.1", ports[0])))
        stack.enter_context(listeners[0].accept()[0])
        database = stack.enter_context(contextlib.closing(sqlite3.connect(folder / "whetstone.db")))
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE t (x)")
        stack.enter_context((folder / "1-00000000-000001.journal").open("wb"))
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", database, app


def test_open_files_of_a_process_are_counted_by_kind(tmp_path: Path) -> None:
    # Files that earlier tests have left open do not count.
    before = open_files(os.getpid(), "http://127.0.0.1:1", [])
    with opened(tmp_path) as (url, model_server, _, app):
        assert open_files(os.getpid(), url, [model_server]) - before == {
            "clients": 1,
            "model servers": 1,
            "journal": 1,
            "database": 1,
            "database's log": 1,
            "database's index": 1,
            # Two that listen, and what is here the other end of a connection.
            "rest": 3,
        }
        app.close()
        assert open_files(os.getpid(), url, [model_server])["clients"] == 1  # this end is still open


def test_a_pool_of_database_connections_that_was_full_is_no_leak(tmp_path: Path) -> None:
    database = tmp_path / "whetstone.db"
    before = open_files(os.getpid(), "http://127.0.0.1:1", [])
    with opened(tmp_path) as (url, model_server, _, _):
        for one in [sqlite3.connect(database) for _ in range(14)]:
            one.execute("SELECT * FROM t").fetchall()
            one.close()
        counts = open_files(os.getpid(), url, [model_server]) - before
        assert counts["database"] > 5
        assert too_many(counts, WHEN_QUIET | {"rest": 3, "clients": 1}) == []


@pytest.mark.parametrize("kind", [*WHEN_QUIET, "rest"])
def test_a_descriptor_lost_every_50_requests_is_a_fault(kind: str) -> None:
    before = Counter({"journal": 1, "database": 1, "database's log": 1, "database's index": 1, "rest": 14})
    lost = Counter({kind: REQUESTS // 50})
    assert too_many(before, WHEN_QUIET | {"rest": 14}) == []
    (fault,) = too_many(before + lost, WHEN_QUIET | {"rest": 14})
    assert fault.startswith(f"open files, {kind}: ")


@pytest.mark.slow
@pytest.mark.long(part="harnesses")
def test_memory_and_files_stay_flat() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.6", "--rate", "150", "--connections", "16"]
    # Within so short a time a process still warms up; a leak would be more.
    command += ["--growth", "0.15"]
    soak = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "calls were answered" not in soak.stdout
    assert "due" not in soak.stdout
    assert soak.returncode == 0, soak.stdout + soak.stderr[-2000:]


USUAL = Counter(
    {
        "clients": 9,
        "model servers": 5,
        "journal": 2,
        "database": 9,
        "database's log": 5,
        "database's index": 1,
        "rest": 14,
    }
)


def steady(*rss_mib: int) -> list[Sample]:
    """One look a tenth of the time."""
    return [Sample(place / 10, place, place, mib * 2**20, USUAL, 0, 0) for place, mib in enumerate(rss_mib)]


@pytest.mark.parametrize(
    ("rss_mib", "is_flat"),
    [
        ((50, 80, 100, 101, 102, 103, 104, 104, 103, 104), True),
        ((50, 80, 100, 101, 102, 103, 104, 105, 106, 107), False),
    ],
)
def test_memory_that_grows_after_the_first_fifth_is_not_flat(rss_mib: tuple[int, ...], is_flat: bool) -> None:
    assert (memory_not_flat(steady(*rss_mib)) == []) is is_flat


def looks(*counts: Counter[str], waiting_segments: int = 0) -> list[Sample]:
    """So many looks, evenly over the time."""
    of_all = enumerate(counts)
    return [Sample(place / len(counts), place, place, 1, files, 0, waiting_segments) for place, files in of_all]


@pytest.mark.parametrize("kind", USUAL)
def test_open_files_of_any_kind_that_grow_are_not_flat(kind: str) -> None:
    growing = looks(*(USUAL + Counter({kind: place // 5}) for place in range(100)))
    (fault,) = files_not_flat(growing, connections=8)
    assert fault.startswith(f"open files, {kind}: ")


def test_what_comes_and_goes_within_its_bound_is_flat() -> None:
    rush = USUAL + Counter({"model servers": 5, "database": 6, "database's log": 10, "journal": 2})
    assert files_not_flat(looks(*[USUAL, rush] * 50), connections=8) == []


def test_what_is_open_for_a_moment_is_flat() -> None:
    moment = USUAL + Counter({"rest": 3, "clients": 2})
    assert files_not_flat(looks(*[USUAL, moment, moment] * 40), connections=8) == []


def test_segments_of_the_journal_that_wait_for_sql_are_no_leak() -> None:
    waiting = USUAL + Counter({"journal": 7})
    assert files_not_flat(looks(*[waiting] * 20, waiting_segments=7), connections=8) == []
    assert files_not_flat(looks(*[waiting] * 20), connections=8) != []
