"""Many calls at once leave the rows that they leave one by one."""

from random import Random
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, select

from migrations import schema
from proxy import tuning
from proxy.domain.address import Address
from proxy.domain.call import Call
from proxy.recording import prefix_delta
from proxy.recording.prefix_delta import Tail, packed
from proxy.recording.store import Store
from tests.unit.proxy.conftest import make_call, make_choice

BEGAN_S = 1_767_268_800.0


def random_calls(seed: int) -> list[Call]:
    """Conversations among one another, with siblings, groups, retries, calls that broke off or come twice."""
    random = Random(seed)
    calls: list[Call] = []
    conversations: dict[str, tuple[list[Any], list[int]]] = {}
    for number in range(80):
        trajectory_id = f"t{random.randrange(8)}"
        messages, prompt = conversations.get(trajectory_id, ([], []))
        question = {"role": "user", "content": f"question {random.randrange(3)}"}
        messages, prompt = [*messages, question], [*prompt, random.randrange(9)]
        token_ids = [random.randrange(9) for _ in range(random.randrange(1, 4))]
        message = {"role": "assistant", "content": "answer"}
        fields = {"token_ids": token_ids, "logprobs": [-0.5] * len(token_ids), "message": message}
        count = random.choice([1, 1, 1, 3])
        values: dict[str, Any] = {
            "choices": tuple(make_choice(index, **fields) for index in range(count)),
            "messages": messages,
            "prompt_token_ids": prompt if random.random() < 0.9 else None,
            "created_at_s": BEGAN_S + number - random.choice([0, 0, 5]),
            "policy_version": number // 20,
            "address": Address(group_id=random.choice([None, None, "g0", "g1"]), retry=random.random() < 0.3),
            "threaded_by": random.choice(["new", "header"]),
            "extends": calls[-1].id if calls and random.random() < 0.2 else None,
        }
        digest = f"{trajectory_id} {len(messages)}"
        if random.random() < 0.25:
            values |= {"status": "aborted", "choices": (), "request_digest": digest}
        elif values["address"].retry:
            values["request_digest"] = digest
        if values.get("status") != "aborted" and random.random() < 0.8:
            conversations[trajectory_id] = ([*messages, message], [*prompt, *token_ids])
        calls.append(make_call(f"c{number:03d}", trajectory_id, **values))
        if random.random() < 0.1:
            calls.append(random.choice(calls))
    return calls


@pytest.mark.parametrize("seed_of_it", range(6))
def test_a_batch_leaves_what_its_calls_leave_one_by_one(engine: Engine, seed: Any, seed_of_it: int) -> None:
    seed.project("other")
    calls, random = random_calls(seed_of_it), Random(seed_of_it)
    for call in calls:
        with engine.begin() as connection:
            Store(engine).calls.write(connection, [call])
    store, left = Store(engine), [msgspec.structs.replace(call, project="other") for call in calls]
    while left:
        count = random.randrange(1, 40)
        with engine.begin() as connection:
            store.calls.write(connection, left[:count], pauses=random.random() < 0.5)
        left = left[count:]
    for table in (schema.completions, schema.trajectories, schema.groups):
        columns = [column for column in table.c if column.name != "project"]
        one_by_one, at_once = (
            [row._asdict() for row in _rows(engine, select(*columns).where(table.c.project == project).order_by("id"))]
            for project in ("default", "other")
        )
        assert len(one_by_one) > 1
        assert at_once == one_by_one
    whys = {row.why_not_trained for row in _rows(engine, select(schema.completions.c.why_not_trained))}
    assert {None, "superseded", "aborted", "no_token_ids"} <= whys


def test_calls_of_new_trajectories_that_are_there_already_stay_as_they_are(engine: Engine, seed: Any) -> None:
    calls = [make_call(f"c{number}", f"t{number}", threaded_by=("new", "header")[number % 2]) for number in range(4)]
    with engine.begin() as connection:
        Store(engine).calls.write(connection, calls[1:3])
    before = _rows(engine, select(schema.trajectories))
    with engine.begin() as connection:  # as after a death: nothing is known
        store = Store(engine)
        store.calls.write(connection, [*calls, calls[0]])
    after = _rows(engine, select(schema.trajectories).order_by(schema.trajectories.c.id))
    assert [(row.id, row.completions) for row in after] == [(call.trajectory_id, 1) for call in calls]
    assert [row for row in after if row.id in {one.id for one in before}] == before
    assert len(_rows(engine, select(schema.completions))) == 4
    with engine.begin() as connection:
        store.calls.write(connection, calls)
    assert len(_rows(engine, select(schema.completions))) == 4


def test_ids_within_answers_are_stored_once_for_each_choice(engine: Engine, seed: Any) -> None:
    def calling(index: int, *ids: str) -> Any:
        return make_choice(index, message={"role": "assistant", "tool_calls": [{"id": one} for one in ids]})

    twice = make_call(
        "c0", "t0", choices=(calling(0, "call_aaaaaaaaa", "call_bbbbbbbbb"), calling(1, "call_ccccccccc"))
    )
    again = make_call("c1", "t1", choices=(calling(0, "call_aaaaaaaaa"),))
    for batch in ([twice, make_call("c2", "t2")], [twice, again], [again]):
        with engine.begin() as connection:
            Store(engine).calls.write(connection, batch)
    assert {tuple(row) for row in _rows(engine, select(schema.answer_ids))} == {
        ("default", "c0", "call_aaaaaaaaa"),
        ("default", "c0", "call_bbbbbbbbb"),
        ("default", "c0.1", "call_ccccccccc"),
        ("default", "c1", "call_aaaaaaaaa"),
    }


@pytest.mark.parametrize("pauses", [False, True])
def test_others_go_first_while_rows_are_made_and_while_they_are_inserted(
    engine: Engine, seed: Any, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    naps: list[int] = []
    monkeypatch.setattr(tuning, "nap", lambda: naps.append(1))
    calls = [make_call(f"c{number:02d}", f"t{number:02d}") for number in range(25)]
    with engine.begin() as connection:
        Store(engine).calls.write(connection, calls, pauses=pauses)
    between_inserts = 2 * 2 if engine.dialect.name == "sqlite" else 0
    assert len(naps) == (25 // tuning.NAP_EVERY + between_inserts if pauses else 0)
    assert len(_rows(engine, select(schema.completions))) == 25


def test_tails_stay_in_memory_by_the_size_of_all_that_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_delta, "MAX_BYTES", 1000)
    tails = prefix_delta.Tails()
    half = Tail("c", packed([1] * 50), [msgspec.Raw(b" " * 200)], (), None)
    for number in (0, 1, 2, 2, 1):
        tails.keep("default", f"t{number}", half)
    assert [tails.knows("default", f"t{number}") for number in range(3)] == [False, True, True]
    tails.keep("default", "t3", Tail("c", packed([]), [msgspec.Raw(b" " * 401)], (), None))
    assert [tails.knows("default", f"t{number}") for number in range(4)] == [False, False, False, True]


def _rows(engine: Engine, query: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(query))
