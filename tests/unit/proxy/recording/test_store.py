import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError

from migrations import schema
from proxy.domain.address import Address
from proxy.domain.call import Call
from proxy.domain.feedback import Feedback
from proxy.domain.feedback_rows import identified, row_of
from proxy.domain.policies import Canary
from proxy.recording.prefix_delta import Tail
from proxy.recording.store import Store
from tests.conftest import as_told
from tests.unit.proxy.conftest import ANSWER_IDS, PROMPT_IDS, make_call, make_choice
from whetstone.domain.why_not_trained import WhyNotTrained

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(engine: Engine, seed: Any) -> Store:
    return Store(engine)


@pytest.fixture
def write(store: Store) -> Callable[..., None]:
    def write(*calls: Call, into: Store = store) -> None:
        with into.engine.begin() as connection:
            into.calls.write(connection, calls)

    return write


@pytest.fixture
def rows(engine: Engine) -> Callable[..., list[Any]]:
    def rows(table: Any = schema.completions) -> list[Any]:
        with engine.connect() as connection:
            return list(connection.execute(as_told(table).order_by(table.c.id)))

    return rows


def talk(turns: int, trajectory_id: str = "t0") -> list[Call]:
    """The calls of a conversation that only grows, in messages and in token ids."""
    calls, messages, prompt = [], [], []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": f"question {turn}"}]
        prompt = [*prompt, 10 * turn, 10 * turn + 1]
        sampled = [10 * turn + 2, 10 * turn + 3]
        message = {"role": "assistant", "content": f"answer {turn}"}
        choice = make_choice(message=message, token_ids=sampled, logprobs=[-0.5, -0.25])
        calls.append(
            make_call(f"{trajectory_id}-{turn}", trajectory_id, messages=messages, prompt_token_ids=prompt,
                      choices=(choice,), created_at_s=1_767_268_800.0 + turn)
        )  # fmt: skip
        messages = [*messages, message]
        prompt = [*prompt, *sampled]
    return calls


def test_a_call_is_stored_with_the_very_ids_and_logprobs(write: Any, rows: Any) -> None:
    write(make_call("c0", end_user="u", ttft_ms=1.0, streamed=True))
    (row,) = rows()
    assert (row.id, row.upstream_id, row.call_id, row.turn) == ("c0", "chatcmpl-c0", "c0", 0)
    assert (row.prompt_token_ids, row.token_ids) == (PROMPT_IDS, ANSWER_IDS)
    assert row.inference_logprobs == [-0.5, -0.25, -0.125]
    assert (row.prompt_tokens, row.completion_tokens) == (3, 3)
    assert (row.policy, row.policy_version, row.status) == ("starter", 0, "complete")
    assert (row.follows, row.new_messages) == (None, [{"role": "user", "content": "hi"}])
    assert (row.response_text, row.why_not_trained, row.end_user) == ("Hello", None, "u")
    assert row.sampling == {"temperature": 1.0}
    (trajectory,) = rows(schema.trajectories)
    assert (trajectory.state, trajectory.completions, trajectory.sampled_tokens) == ("open", 1, 3)


def test_a_growing_conversation_is_stored_once(write: Any, rows: Any) -> None:
    write(*talk(4))
    for turn, row in enumerate(rows()):
        assert row.follows == (f"t0-{turn - 1}" if turn else None)
        assert row.new_messages == [{"role": "user", "content": f"question {turn}"}]
        assert row.prompt_token_ids == [10 * turn, 10 * turn + 1]
        assert row.prompt_tokens == 4 * turn + 2


def test_a_restarted_proxy_goes_on_where_the_last_one_stopped(write: Any, rows: Any, engine: Engine) -> None:
    for call in talk(4):
        write(call, into=Store(engine))
    assert [row.follows for row in rows()] == [None, "t0-0", "t0-1", "t0-2"]


def test_conversations_read_back_are_the_requests(write: Any, engine: Engine) -> None:
    calls = talk(3)
    write(*calls)
    with engine.connect() as connection:
        read = connection.execute(text("SELECT * FROM admin_conversations ORDER BY turn")).mappings().all()
    for call, row in zip(calls, read, strict=True):
        messages, ids = row["messages"], row["prompt_token_ids"]
        assert (json.loads(messages) if isinstance(messages, str) else messages) == [
            json.loads(bytes(message)) for message in call.messages
        ]
        assert (json.loads(ids) if isinstance(ids, str) else ids) == call.prompt_token_ids


def test_what_the_app_says_anew_about_its_past_is_stored_whole(write: Any, rows: Any) -> None:
    first, second = talk(2)
    compacted = make_call("t0-1", messages=[{"role": "user", "content": "summary"}], prompt_token_ids=[9, 9])
    write(first, compacted)
    row = rows()[1]
    assert (row.turn, row.follows, row.prompt_token_ids) == (1, None, [9, 9])
    assert second.trajectory_id == compacted.trajectory_id


def test_a_call_written_again_changes_nothing(write: Any, rows: Any) -> None:
    calls = talk(3)
    write(*calls)
    before, trajectory = rows(), rows(schema.trajectories)
    write(*calls)
    write(*calls)
    assert (rows(), rows(schema.trajectories)) == (before, trajectory)


def test_each_further_choice_opens_a_sibling_in_one_group(write: Any, rows: Any) -> None:
    write(make_call("c0", choices=tuple(make_choice(index) for index in range(3))))
    assert [(row.id, row.choice, row.trajectory_id, row.turn) for row in rows()] == [
        ("c0", 0, "t0", 0), ("c0.1", 1, "t0.1", 0), ("c0.2", 2, "t0.2", 0)
    ]  # fmt: skip
    assert {(row.call_id, row.upstream_id, tuple(row.prompt_token_ids)) for row in rows()} == {
        ("c0", "chatcmpl-c0", tuple(PROMPT_IDS))
    }
    (group,) = rows(schema.groups)
    assert (group.formed_by, group.state) == ("choices", "open")
    assert [row.group_id for row in rows(schema.trajectories)] == [group.id] * 3


def test_choices_of_a_later_turn_are_no_siblings_of_the_first_ones(write: Any, rows: Any) -> None:
    choices = tuple(make_choice(index) for index in range(2))
    write(make_call("c0", choices=choices), make_call("c1", choices=choices, extends="c0"))
    assert {(row.id, row.trajectory_id) for row in rows()} == {
        ("c0", "t0"), ("c0.1", "t0.1"), ("c1", "t0"), ("c1.1", "c1.1")
    }  # fmt: skip
    assert {row.id: row.group_id for row in rows(schema.trajectories)} == {
        "t0": "t0.choices", "t0.1": "t0.choices", "c1.1": "c1.choices"
    }  # fmt: skip


def test_siblings_of_a_group_the_app_named_belong_to_it(write: Any, rows: Any) -> None:
    address = Address(trajectory_id="t0", group_id="g")
    write(make_call("c0", address=address, choices=(make_choice(0), make_choice(1))))
    (group,) = rows(schema.groups)
    assert (group.id, group.formed_by) == ("g", "header")
    assert [row.group_id for row in rows(schema.trajectories)] == ["g", "g"]


def test_the_address_is_kept(write: Any, rows: Any) -> None:
    address = Address(
        trajectory_id="t0", group_id="g", group_size=4, task="chess", split="eval", no_train=True, metadata={"a": [1]}
    )
    write(make_call(address=address))
    assert [group.target_size for group in rows(schema.groups)] == [4]
    (row,) = rows(schema.trajectories)
    assert (row.group_id, row.task, row.split, row.no_train, row.metadata) == ("g", "chess", "eval", True, {"a": [1]})


def test_a_call_that_said_nothing_is_kept_too(write: Any, rows: Any) -> None:
    write(make_call(status="aborted", choices=(), prompt_token_ids=None, prompt_tokens=None))
    (row,) = rows()
    assert (row.status, row.why_not_trained, row.response) == ("aborted", "aborted", None)
    assert (row.token_ids, row.inference_logprobs, row.prompt_token_ids, row.completion_tokens) == (None,) * 4


@pytest.mark.parametrize(
    ("values", "choice", "why"),
    [
        ({"status": "error", "error": "boom"}, {}, "error"),
        ({"status": "aborted"}, {}, "aborted"),
        ({"bent": "sampling_bent: top_p"}, {}, "sampling_bent: top_p"),
        ({"bent": "greedy"}, {}, "greedy"),
        ({"prompt_token_ids": None}, {}, "no_token_ids"),
        ({}, {"token_ids": None}, "no_token_ids"),
        ({}, {"logprobs": None}, "no_logprobs"),
        ({}, {"logprobs": [-0.5]}, "no_logprobs"),
        ({}, {"logprobs": [-0.5, -9999.0, -0.5]}, "no_logprobs"),
    ],
)
def test_what_cannot_be_trained_on_says_why(write: Any, rows: Any, values: Any, choice: Any, why: str) -> None:
    write(make_call(choices=(make_choice(**choice),), **values))
    (row,) = rows()
    assert row.why_not_trained == why
    assert why.split(":")[0] in set(WhyNotTrained)


def test_what_constrained_the_sampling_is_stored(write: Any, rows: Any) -> None:
    constraints = {"top_p": 0.9, "logit_bias": {"5": 1.0}, "grammar": "tools"}
    write(make_call("c0", "t0"), make_call("c1", "t1", constraints=constraints))
    assert [(row.constraints, row.why_not_trained) for row in rows()] == [(None, None), (constraints, None)]


GREEDY, ABORTED = {"bent": "greedy"}, {"status": "aborted"}
MEDIA = {"bent": "media"}


@pytest.mark.parametrize(
    ("turns", "whys"),
    [
        ([{}], [None]),
        ([GREEDY, GREEDY], ["greedy", "greedy"]),
        ([GREEDY, MEDIA], ["greedy", "greedy"]),
        ([GREEDY, ABORTED], ["greedy", "greedy"]),
        # An accident tells less of an app than what it does always.
        ([ABORTED, GREEDY, MEDIA], ["aborted", "greedy", "greedy"]),
        ([GREEDY, {}, GREEDY], ["greedy", "no_reward", "no_reward"]),
        ([{}, GREEDY], [None, None]),
        ([{"bent": "sampling_bent: x"}, {}], ["sampling_bent: x", "no_reward"]),
    ],
)
def test_a_trajectory_has_the_reason_that_all_its_completions_have(
    write: Any, rows: Any, engine: Engine, turns: list[dict[str, Any]], whys: list[str | None]
) -> None:
    calls = [msgspec.structs.replace(call, **turn) for call, turn in zip(talk(len(turns)), turns, strict=True)]
    seen = []
    for call in calls:
        write(call, into=Store(engine))
        seen.append(rows(schema.trajectories)[0].why_not_trained)
    assert seen == whys
    write(*(msgspec.structs.replace(call, id=f"u-{call.id}", trajectory_id="u") for call in calls))
    assert rows(schema.trajectories)[1].why_not_trained == whys[-1], "at once they leave the same"


@pytest.mark.parametrize("stored", ["no_reward", "waiting_step", None])
def test_what_a_trajectory_waits_for_stays_while_one_completion_trains(
    write: Any, rows: Any, engine: Engine, stored: str | None
) -> None:
    first, second = talk(2)
    write(first)
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(why_not_trained=stored))
    write(msgspec.structs.replace(second, bent="greedy"))
    assert rows(schema.trajectories)[0].why_not_trained == stored


@pytest.mark.parametrize("address", [{"split": "eval"}, {"no_train": True}])
def test_what_the_app_keeps_from_training_needs_no_other_reason(write: Any, rows: Any, address: dict[str, Any]) -> None:
    write(make_call(bent="greedy", address=Address(trajectory_id="t0", **address)))
    assert rows(schema.trajectories)[0].why_not_trained is None, "the judging worker writes it"


@pytest.mark.parametrize("state", ["rewarded", "claimed", "trained", "excluded"])
def test_what_is_over_keeps_its_reason(write: Any, rows: Any, engine: Engine, state: str) -> None:
    first, second = talk(2)
    write(msgspec.structs.replace(first, bent="greedy"))
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state=state))
    write(second)
    assert rows(schema.trajectories)[0].why_not_trained == "greedy"


def test_a_call_after_the_reward_is_not_trained_on(write: Any, rows: Any, engine: Engine) -> None:
    first, second = talk(2)
    write(first)
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(state="rewarded"))
    write(second)
    assert [row.why_not_trained for row in rows()] == [None, "trajectory_over"]


def test_nul_is_stored_as_its_replacement(write: Any, rows: Any) -> None:
    choice = make_choice(message={"role": "assistant", "content": "a\x00b"})
    texts = {"messages": [{"role": "user", "content": "\x00", "\x00": 1}], "end_user": "\x00"}
    write(make_call(**texts, bent="sampling_bent: a\x00b", choices=(choice,)))
    (row,) = rows()
    assert row.why_not_trained == "sampling_bent: a\ufffdb"
    assert row.new_messages == [{"role": "user", "content": "\ufffd", "\ufffd": 1}]
    assert (row.response_text, row.end_user, row.token_ids) == ("a\ufffdb", "\ufffd", ANSWER_IDS)


def test_who_writes_has_a_connection_with_room_on_sqlite(store: Store) -> None:
    if store.engine.dialect.name != "sqlite":
        assert store.writing is store.engine
        return
    pragmas = []
    for engine in (store.engine, store.writing):
        with engine.connect() as connection:
            names = ("cache_size", "temp_store", "wal_autocheckpoint")
            pragmas.append([connection.execute(text(f"PRAGMA {name}")).scalar_one() for name in names])
    assert pragmas == [[-512, 0, 1000], [-4096, 2, 4000]]


def test_a_turn_that_another_writer_took_is_an_error_and_no_silence(write: Any, engine: Engine) -> None:
    first, second = talk(2)
    write(first)
    with engine.begin() as connection:
        connection.execute(schema.trajectories.update().values(completions=0))
    with pytest.raises(IntegrityError):
        write(second)


def test_feedback_with_a_key_is_taken_once(store: Store, rows: Any) -> None:
    row = row_of(Feedback(trajectory_id="t", reward=0.0, idempotency_key="k"), "default", NOW)
    again = row_of(Feedback(trajectory_id="t", reward=1.0, idempotency_key="k"), "default", NOW)
    free = row_of(Feedback(trajectory_id="t", reward=1.0), "default", NOW)
    with store.engine.begin() as connection:
        taken = store.insert_feedback(connection, [row, again, free, free | {"id": "other"}])
    first = row["id"]
    assert taken == [(first, True), (first, False), (free["id"], True), ("other", True)]
    assert sorted(stored.reward for stored in rows(schema.feedback)) == [0.0, 1.0, 1.0]
    assert {stored.state for stored in rows(schema.feedback)} == {"waiting"}


def test_feedback_that_is_there_already_is_not_added_again(store: Store, rows: Any) -> None:
    """Who took it cannot always know whether the database did: the same rows come again, and stand as they were."""
    free = row_of(Feedback(trajectory_id="t", reward=1.0), "default", NOW)
    keyed = identified(row_of(Feedback(trajectory_id="t", reward=0.0, idempotency_key="k"), "default", NOW))
    for _ in range(2):
        with store.engine.begin() as connection:
            ids = [one.id for one in store.insert_feedback(connection, [free, keyed])]
            connection.execute(schema.feedback.update().values(state="applied"))
    assert sorted(ids) == sorted(row.id for row in rows(schema.feedback))
    assert {row.state for row in rows(schema.feedback)} == {"applied"}


def test_an_idempotency_key_makes_the_same_id_in_its_project_alone() -> None:
    def key(project: str, name: str) -> str:
        return identified(row_of(Feedback(trajectory_id="t", idempotency_key=name), project, NOW))["id"]

    assert key("default", "k") == key("default", "k")
    assert len({key("default", "k"), key("default", "l"), key("other", "k")}) == 3
    assert len(key("default", "k")) == 32


def test_what_is_not_there_is_none(store: Store) -> None:
    assert store.feedback("default", "x") is None
    assert store.trajectory("default", "x") is None
    assert store.group("default", "x") is None
    assert store.policies("other") == []


def test_another_projects_rows_are_not_there(store: Store, write: Any) -> None:
    write(make_call())
    assert store.trajectory("default", "t0") is not None
    assert store.trajectory("other", "t0") is None


def test_policies_come_with_their_served_versions_and_other_names(store: Store, engine: Engine) -> None:
    (policy,) = store.policies("default")
    version = {"project": "default", "policy": "starter", "state": "retired", "created_at": NOW}
    with engine.begin() as connection:
        for number, served in ((7, True), (8, False)):
            values = version | {"id": f"starter@v{number}", "version": number, "served": served}
            connection.execute(schema.policy_versions.insert().values(**values))
        connection.execute(schema.policies.update().values(aliases=["gpt-4o"], upstream="openai", base_model="gpt-9"))
    (read_policy,) = store.policies("default")
    assert read_policy.served_versions == policy.served_versions | {7}
    assert (policy.aliases, policy.upstream, policy.upstream_model) == ((), None, None)
    assert (read_policy.aliases, read_policy.upstream, read_policy.upstream_model) == (("gpt-4o",), "openai", "gpt-9")


def test_policies_tell_what_may_be_pinned_and_what_is_tried_on_apps(store: Store, engine: Engine) -> None:
    version = {"project": "default", "policy": "starter", "created_at": NOW}
    states = {
        1: ("retired", True, None),
        2: ("retired", False, None),
        3: ("rejected", False, None),
        4: ("candidate", True, None),
        5: ("candidate", True, 0.1),
    }
    with engine.begin() as connection:
        for number, (state, served, share) in states.items():
            values = version | {"id": f"starter@v{number}", "version": number, "state": state, "served": served}
            connection.execute(schema.policy_versions.insert().values(canary_share=share, **values))
    (read_policy,) = store.policies("default")
    assert read_policy.served_versions == {0, 1, 4, 5}
    assert read_policy.pinnable_versions == {0, 1}
    assert read_policy.canary == Canary(5, 0.1)
    with engine.begin() as connection:
        v = schema.policy_versions.c
        connection.execute(schema.policy_versions.update().where(v.version == 5).values(canary_share=None))
    (read_policy,) = store.policies("default")
    assert read_policy.canary is None


def test_probe_tokens_of_all_versions_are_counted(store: Store, engine: Engine) -> None:
    version = {"project": "default", "policy": "starter", "state": "retired", "served": False, "created_at": NOW}
    with engine.begin() as connection:
        for number, tokens in ((7, 5), (8, None), (9, 6)):
            values = version | {"id": f"starter@v{number}", "version": number, "probe_tokens": tokens}
            connection.execute(schema.policy_versions.insert().values(**values))
    assert store.probe_tokens(["default"]) == 11
    assert store.probe_tokens(["other"]) == 0


def test_an_answer_is_found_again_by_its_turn_key(store: Store, write: Any) -> None:
    write(make_call("c0", address=Address(turn_key="key:k"), reply=b"sent", choices=(make_choice(0), make_choice(1))))
    write(make_call("c1", "t1", address=Address(turn_key="key:unanswered"), status="aborted"))
    assert store.reply("default", "key:k") == b"sent"
    assert store.reply("default", "key:unanswered") is None
    assert store.reply("other", "key:k") is None


ABORTED = {
    "status": "aborted",
    "choices": (),
    "prompt_token_ids": None,
    "prompt_tokens": None,
    "request_digest": "d",
    "threaded_by": "new",
}


def retry(call_id: str, **values: Any) -> Any:
    """The same request once more, of a client that says so."""
    row = {"trajectory_id": f"t-{call_id}", "address": Address(group_id="g", retry=True), "request_digest": "d"}
    return make_call(call_id, **{"threaded_by": "new"} | row | values)


def test_a_retry_takes_the_place_of_the_call_that_was_not_answered(write: Any, rows: Any) -> None:
    write(make_call("c0", "t0", address=Address(group_id="g"), **ABORTED))
    write(retry("c1"))
    first, second = rows()
    assert (first.why_not_trained, first.request_digest) == ("superseded", None)
    assert (second.retry_of, second.why_not_trained, second.request_digest) == ("c0", None, None)
    trajectories = {row.id: row for row in rows(schema.trajectories)}
    assert (trajectories["t0"].state, trajectories["t0"].why_not_trained) == ("excluded", "superseded")
    assert trajectories["t-c1"].state == "open"


def test_retries_of_retries_lead_back_one_by_one(write: Any, rows: Any) -> None:
    write(make_call("c0", "t0", **ABORTED))
    write(retry("c1", **ABORTED))
    write(retry("c2"))
    assert [(row.id, row.retry_of, row.why_not_trained) for row in rows()] == [
        ("c0", None, "superseded"), ("c1", "c0", "superseded"), ("c2", "c1", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "first",
    [
        {"request_digest": "other"},
        {"address": Address(trajectory_id="t0"), "threaded_by": "header"},
        {"created_at_s": 1_767_268_800.0 - 16 * 60},
        {"project": "other"},
    ],
    ids=lambda first: next(iter(first)),
)
def test_what_is_no_retry_of_it_supersedes_nothing(write: Any, rows: Any, first: dict[str, Any]) -> None:
    write(make_call("c0", "t0", **ABORTED | first))
    write(retry("c1"))
    by_id = {row.id: row for row in rows()}
    assert by_id["c0"].why_not_trained == "aborted"
    assert by_id["c1"].retry_of is None


def test_an_equal_body_that_says_nothing_of_a_retry_is_a_member_of_its_own(write: Any, rows: Any) -> None:
    write(make_call("c0", "t0", **ABORTED))
    write(retry("c1", address=Address(group_id="g")))
    assert [row.why_not_trained for row in rows()] == ["aborted", None]


def test_of_two_unanswered_equals_nobody_knows_which_is_asked_again(write: Any, rows: Any) -> None:
    write(make_call("c0", "t0", **ABORTED), make_call("c1", "t1", **ABORTED))
    write(retry("c2"))
    assert [row.retry_of for row in rows()] == [None, None, None]
    assert [row.why_not_trained for row in rows()] == ["aborted", "aborted", None]


def test_the_same_turn_key_says_which_of_several_it_is(write: Any, rows: Any) -> None:
    key = Address(turn_key="key:k")
    write(make_call("c0", "t0", address=key, **ABORTED), make_call("c1", "t1", **ABORTED))
    write(retry("c2", address=key))
    assert [row.retry_of for row in rows()] == [None, None, "c0"]


def test_every_choice_is_linked_to_its_own(write: Any, rows: Any) -> None:
    sampled = (make_choice(0), make_choice(1))
    write(make_call("c0", "t0", **ABORTED | {"choices": sampled}))
    write(retry("c1", choices=sampled))
    assert {row.id: row.retry_of for row in rows() if row.call_id == "c1"} == {"c1": "c0", "c1.1": "c0.1"}


def test_a_trajectory_with_other_turns_stays(write: Any, rows: Any) -> None:
    write(make_call("c0", "t0"), make_call("c1", "t0", **ABORTED))
    write(retry("c2", trajectory_id="t0"))
    (trajectory,) = rows(schema.trajectories)
    assert (trajectory.state, trajectory.why_not_trained, trajectory.completions) == ("open", None, 3)


# NUL is stored as another character: what follows such a message is stored whole again after a restart.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"]), "content": TEXT | st.none()},
    optional={"x": st.lists(st.integers(-5, 5) | st.booleans() | st.sampled_from([0.5, 1.0]), max_size=2)},
)
IDS = st.lists(st.integers(0, 2), max_size=3)
TURN = st.tuples(st.booleans(), st.lists(MESSAGE, min_size=1, max_size=2), IDS.filter(bool), IDS, st.booleans())


def _comparable(tail: Tail | None) -> Any:
    """A tail without the bytes that the app sent, which are not in the tables."""
    if tail is None:
        return None
    messages = [
        None if place in tail.answers else msgspec.json.decode(message) for place, message in enumerate(tail.messages)
    ]
    return msgspec.structs.astuple(msgspec.structs.replace(tail, messages=[])), messages


@given(st.lists(TURN, max_size=5))
@examples(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tail_read_back_is_the_tail_remembered(store: Store, engine: Engine, turns: list[Any]) -> None:
    trajectory_id = f"t{datetime.now(UTC).timestamp()}"
    prompt: list[int] = []
    messages: list[Any] = []
    sampled: list[int] = []
    for number, (goes_on, new_messages, new_ids, answer, has_tools) in enumerate(turns):
        if goes_on and number:
            messages = [*messages, {"role": "assistant", "content": "a"}, *new_messages]
            prompt = [*prompt, *sampled, *new_ids]
        else:
            messages, prompt = new_messages, new_ids
        sampled = answer
        tools = [{"type": "function", "function": {"name": "f"}}] if has_tools else None
        choice = make_choice(token_ids=answer, logprobs=[-0.5] * len(answer))
        call = make_call(
            f"{trajectory_id}-{number}", trajectory_id, messages=messages, prompt_token_ids=prompt, tools=tools,
            choices=(choice,),
        )  # fmt: skip
        with engine.begin() as connection:
            store.calls.write(connection, [call])
            remembered = store.calls.tails.of(connection, "default", trajectory_id, call.id)
            read = Store(engine).calls.tails.of(connection, "default", trajectory_id, call.id)
            assert _comparable(read) == _comparable(remembered)


@pytest.mark.parametrize(("state", "why"), [("training", "waiting_step"), ("recording", "policy_not_training")])
def test_what_waits_for_a_policy_that_does_not_train_says_so(engine: Engine, seed: Any, state: str, why: str) -> None:
    seed.trajectory("t", why_not_trained="waiting_step")
    with engine.begin() as connection:
        connection.execute(schema.policies.update().values(state=state))
    row = Store(engine).trajectory("default", "t")
    assert row is not None and row["why_not_trained"] == why
