"""`whetstone import`: a log in OpenAI's format becomes trajectories, once, and none of it is trained on by weight."""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, select, text

from judge.settlement.sweep import sweep
from migrations import schema
from proxy.domain.call import Choice
from proxy.inference.context import owner_of
from proxy.trajectories.conversation_hash import ConversationHasher
from tests.conftest import NOW, Seed, as_told
from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ExampleSelection
from trainer.store.examples.sources import find
from whetstone.config.privacy import pseudonym
from whetstone.config.settings import GroupSettings, Settings, SettingsError
from whetstone.privacy.eraser import erasing
from whetstone.privacy.eraser import run as erase
from whetstone.privacy.store import Target
from whetstone.registry.projects import Store
from whetstone.transfer.exporting import files
from whetstone.transfer.exporting.exporter import ExportOptions
from whetstone.transfer.exporting.exporter import run as export
from whetstone.transfer.exporting.store import Filter
from whetstone.transfer.importing.importer import ImportOptions, InvalidLog, Outcome, check, run
from whetstone.transfer.importing.schema import BadLine, read_line
from whetstone.transfer.importing.store import NotImportable

Row = dict[str, Any]
Importing = Callable[..., Outcome]
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def call(messages: Sequence[Row], answer: str, **given: Any) -> Row:
    """A line as gateways log it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    request = {"model": "gpt-4o", "messages": list(messages), "temperature": 0.5} | given.pop("request", {})
    response = {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    return {"request": request, "response": response | given.pop("response", {})} | given


@pytest.fixture
def imported(engine: Engine, tmp_path: Path) -> Importing:
    """Imports lines from a file."""

    def run_it(*lines: Row | str, **given: Any) -> Outcome:
        file = tmp_path / "log.jsonl"
        told = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{line}\n" for line in told), encoding="utf-8")
        wanted = ImportOptions(file, "default", **({"policy": "imported"} | given))
        return run(engine, wanted, check(wanted, lambda _: None), lambda _: None)

    return run_it


def rows(engine: Engine, table: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(as_told(table).order_by(table.c.id)))


def told(engine: Engine) -> list[tuple[str, list[str]]]:
    """Each conversation as the admin view joins it up, with its answer."""
    query = text("""
        SELECT v.trajectory_id, v.messages, c.response_text FROM admin_conversations AS v
        JOIN admin_completions AS c ON c.project = v.project AND c.completion_id = v.completion_id
        ORDER BY v.trajectory_id, v.turn
    """)
    with engine.connect() as connection:
        found = [(row[0], json.loads(row[1]) if isinstance(row[1], str) else row[1], row[2]) for row in
                 connection.execute(query)]  # fmt: skip
    return [
        (trajectory_id, [*(one["content"] for one in messages), answer]) for trajectory_id, messages, answer in found
    ]


def test_every_answer_of_a_conversation_is_a_turn_that_stores_what_it_adds(engine: Engine, imported: Importing) -> None:
    more = [{"role": "user", "content": "and"}, {"role": "assistant", "content": "bye"}]
    line = {"messages": [USER, ANSWER, *more], "reward": 0.5, "task": "x", "metadata": {"a": 1}, "trajectory_id": "t"}
    outcome = imported(line)
    assert (outcome.counted["trajectories"], outcome.counted["completions"]) == (1, 2)
    (trajectory,) = rows(engine, schema.trajectories)
    assert (trajectory.id, trajectory.policy, trajectory.reward, trajectory.task) == ("t", "imported", 0.5, "x")
    assert (trajectory.state, trajectory.why_not_trained, trajectory.metadata) == ("excluded", "imported", {"a": 1})
    with engine.connect() as connection:
        first, second = connection.execute(as_told(schema.completions).order_by(schema.completions.c.turn))
    assert (first.new_messages, first.response, first.follows) == ([USER], ANSWER, None)
    assert (second.new_messages, second.response_text, second.follows) == ([more[0]], "bye", first.id)
    assert first.continued_by == second.id
    assert trajectory.tail_completion_id == second.id
    assert (first.token_ids, first.inference_logprobs, first.why_not_trained) == (None, None, "imported")
    assert told(engine) == [("t", ["hi", "hello"]), ("t", ["hi", "hello", "and", "bye"])]


def test_the_same_file_twice_is_imported_once_and_what_it_repeats_is_kept(engine: Engine, imported: Importing) -> None:
    lines = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}, call([USER], "yes"), call([USER], "yes")]
    assert imported(*lines).counted["trajectories"] == 4
    again = imported(*lines, {"messages": [USER, {"role": "assistant", "content": "new"}]})
    assert (again.counted["trajectories"], again.counted["there"]) == (1, 4)
    assert len(rows(engine, schema.completions)) == 5


def test_calls_that_extend_one_another_are_one_trajectory(engine: Engine, imported: Importing) -> None:
    first = call([USER], "hello", response={"id": "chatcmpl-1"})
    said = [USER, {"role": "assistant", "content": [{"type": "text", "text": " hello "}]}]
    second = call([*said, {"role": "user", "content": "and"}], "bye", response={"id": "chatcmpl-2"}, reward=1)
    other = call([*said, {"role": "user", "content": "else"}], "no", response={"id": "chatcmpl-3"})
    imported(first)
    imported(second, other)  # another file: what it goes on from is found in the tables
    trajectories = {row.id: row for row in rows(engine, schema.trajectories)}
    completions = {row.upstream_id: row for row in rows(engine, schema.completions)}
    one, two, three = (completions[f"chatcmpl-{number}"] for number in (1, 2, 3))
    assert one.trajectory_id == two.trajectory_id != three.trajectory_id
    assert (two.follows, two.turn, two.threaded_by) == (one.id, 1, "content")
    assert (three.follows, three.threaded_by) == (None, "fork")
    assert trajectories[three.trajectory_id].continues == one.id
    assert trajectories[one.trajectory_id].reward == 1.0
    assert trajectories[one.trajectory_id].completions == 2
    assert (one.prompt_tokens, one.completion_tokens, one.sampling) == (7, 2, {"temperature": 0.5})
    assert trajectories[one.trajectory_id].metadata == {"model": "gpt-4o"}


TOOL_CALL = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CLOCK = r"\d\d:\d\d"


@pytest.mark.parametrize(
    ("asked", "answer", "user", "normalise"),
    [
        pytest.param([USER], {"content": "hello"}, None, (), id="nobody is named"),
        pytest.param([USER], {"content": " hello "}, "alice", (), id="its user is named"),
        pytest.param([USER], {"content": [{"text": "hello"}]}, None, (), id="a part without a type"),
        pytest.param([{"role": "user", "content": [{"type": None, "text": "a"}, {"text": "b"}]}], ANSWER, None, (),
                     id="a question of parts without a type"),
        pytest.param([{"role": "user", "content": "a\x00b"}], {"content": "c\x00"}, None, (), id="NUL"),
        pytest.param([{"role": "system", "content": "It is 12:31."}, USER], ANSWER, None, (CLOCK,), id="normalise"),
        pytest.param([USER], {"content": None, "tool_calls": [TOOL_CALL]}, "alice", (), id="tool calls"),
        pytest.param([USER], {"content": None, "function_call": TOOL_CALL["function"]}, None, (), id="function call"),
        pytest.param([USER, ANSWER, USER], {"content": "hello"}, None, (), id="a second answer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", ["conversation", "call"])
def test_an_imported_conversation_has_the_hashes_of_the_same_one_served(
    engine: Engine, imported: Importing, shape: str, asked: list[Row], answer: Row, user: str | None,
    normalise: tuple[str, ...],
) -> None:  # fmt: skip
    message = {"role": "assistant"} | answer
    if shape == "call":
        line = call(asked, "", request={"user": user}, response={"choices": [{"message": message}]})
    else:
        weighed = [one | ({"weight": 0} if one["role"] == "assistant" else {}) for one in asked]
        line = {"messages": [*weighed, message], "end_user": user}
    imported(line, normalise=normalise)
    (row,) = rows(engine, schema.completions)
    proxy = ConversationHasher(normalise)
    conversation = proxy.conversation([msgspec.Raw(msgspec.json.encode(one)) for one in asked], owner_of(None, user))
    served = proxy.history(conversation, Choice(0, message))
    assert (row.history, row.tool_history) == (served.conversation, served.tool_calls)


def test_a_call_is_found_by_the_tool_calls_that_it_answers_whatever_stands_before_them(
    engine: Engine, imported: Importing
) -> None:
    """As the proxy finds it: the app wrote another system message."""
    before, after = ({"role": "system", "content": f"It is {time}."} for time in ("12:31", "12:32"))
    said = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    result = {"role": "tool", "tool_call_id": TOOL_CALL["id"], "content": "here"}
    first = call([before, USER], "", response={"id": "chatcmpl-1", "choices": [{"message": said}]})
    second = call([after, USER, said, result], "done", response={"id": "chatcmpl-2"})
    other = call([after, USER, said, result], "else", response={"id": "chatcmpl-3"})
    imported(first)
    imported(second, other)
    found = {row.upstream_id: row for row in rows(engine, schema.completions)}
    one, two, three = (found[f"chatcmpl-{number}"] for number in (1, 2, 3))
    assert (two.trajectory_id, two.threaded_by, one.continued_by) == (one.trajectory_id, "tool_calls", two.id)
    assert (two.follows, two.new_messages) == (None, [after, USER, said, result]), "it repeats other words"
    assert (three.trajectory_id != one.trajectory_id, three.threaded_by) == (True, "fork")


def test_what_normalise_matches_threads_calls_of_a_log_and_is_kept_as_it_was_said(
    engine: Engine, imported: Importing
) -> None:
    before, after = ({"role": "system", "content": f"It is {time}."} for time in ("12:31", "12:32"))
    lines = [
        call([before, USER], "hello", response={"id": "chatcmpl-1"}),
        call([after, USER, ANSWER, USER], "bye", response={"id": "chatcmpl-2"}),
        {"messages": [before, USER, ANSWER], "trajectory_id": "t"},
    ]
    imported(*lines, normalise=(CLOCK,))
    stored = {row.upstream_id: row for row in rows(engine, schema.completions)}
    one, two = stored["chatcmpl-1"], stored["chatcmpl-2"]
    assert (one.trajectory_id, two.threaded_by, one.continued_by) == (two.trajectory_id, "content", two.id)
    assert (two.follows, two.new_messages) == (None, [after, USER, ANSWER, USER])
    again = imported(*lines)
    assert (again.counted["there"], again.counted["completions"]) == (3, 0), "the setting is no part of what is there"


def test_of_calls_that_say_the_same_the_oldest_one_is_gone_on_from_first(engine: Engine, imported: Importing) -> None:
    stamps = [f"2026-01-01T00:00:0{second}Z" for second in range(8)]
    begun = [
        call([USER], "hello", response={"id": f"chatcmpl-{place}"}, timestamp=stamp)
        for place, stamp in enumerate(stamps)
    ]
    more = [
        call([USER, ANSWER, USER], f"{place}", response={"id": f"more-{place}"}, timestamp="2026-01-01T00:01:00Z")
        for place in range(8)
    ]
    imported(*begun)
    imported(*more)
    found = {row.upstream_id: row for row in rows(engine, schema.completions)}
    assert [found[f"more-{place}"].follows for place in range(8)] == [
        found[f"chatcmpl-{place}"].id for place in range(8)
    ]


def test_two_users_never_share_a_trajectory(engine: Engine, imported: Importing) -> None:
    on = [USER, ANSWER, {"role": "user", "content": "and"}]
    imported(call([USER], "hello", request={"user": "alice"}), call(on, "bye", request={"user": "bob"}))
    assert {row.end_user for row in rows(engine, schema.trajectories)} == {"alice", "bob"}


def test_a_named_trajectory_takes_its_lines_in_order(engine: Engine, imported: Importing) -> None:
    tags = {"trajectory_id": "t", "group_id": "g", "split": "eval"}
    imported(
        call([USER], "hello", request={"metadata": {**tags, "kept": 1}}),
        call([USER, ANSWER, USER], "bye", request={"metadata": tags}, no_train=True, reward=0),
    )
    (trajectory,) = rows(engine, schema.trajectories)
    assert (trajectory.id, trajectory.group_id, trajectory.split) == ("t", "g", "eval")
    assert trajectory.metadata == {"kept": 1, "model": "gpt-4o"}
    assert (trajectory.completions, trajectory.reward) == (2, 0.0)
    assert told(engine)[-1] == ("t", ["hi", "hello", "hi", "bye"])


def test_choices_of_a_call_are_siblings_in_one_group(engine: Engine, imported: Importing) -> None:
    choices = [{"message": {"role": "assistant", "content": word}, "finish_reason": "stop"} for word in ("a", "b")]
    line = call([USER], "", response={"id": "chatcmpl-1", "choices": choices})
    assert imported(line).counted["trajectories"] == 2
    first, second = rows(engine, schema.completions)
    assert (first.choice, second.choice, first.call_id) == (0, 1, second.call_id)
    (group,) = rows(engine, schema.groups)
    assert (group.formed_by, group.state, group.reason, group.size) == ("choices", "discarded", "imported", 2)
    assert imported(line).counted["there"] == 2


def test_a_preference_is_two_conversations_in_one_group(engine: Engine, imported: Importing) -> None:
    more = [ANSWER, {"role": "user", "content": "and"}, {"role": "assistant", "content": "bye"}]
    rejected = [{"role": "assistant", "content": "no"}]
    line = {"prompt": [USER], "chosen": more, "rejected": rejected, "task": "x"}
    scored = line | {"chosen_reward": 0.75, "rejected_reward": 0.25, "group_id": "g"}
    for _ in range(2):  # the same file twice is imported once
        imported(line, scored)
    stored = sorted(rows(engine, schema.trajectories), key=lambda row: -row.reward)
    assert [(row.reward, row.completions, row.task) for row in stored] == [
        (1.0, 2, "x"), (0.75, 2, "x"), (0.25, 1, "x"), (0.0, 1, "x"),
    ]  # fmt: skip
    better, scored_better, scored_worse, worse = stored
    assert better.group_id == worse.group_id == f"{better.id}.choices"
    assert scored_better.group_id == scored_worse.group_id == "g"
    of_pair = [texts for trajectory_id, texts in told(engine) if trajectory_id in (better.id, worse.id)]
    assert sorted(of_pair, key=len) == [["hi", "hello"], ["hi", "no"], ["hi", "hello", "and", "bye"]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rejected": None}, "rejected must be a list of messages"),
        ({"prompt": "hi"}, "prompt must be a list of messages"),
        ({"chosen": [USER]}, "the last message of chosen must be the assistant's"),
        ({"chosen_reward": -1}, "chosen_reward -1 is not above rejected_reward 0"),
    ],
)
def test_half_a_preference_says_what_is_missing(change: Row, why: str) -> None:
    line = {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]} | change
    with pytest.raises(BadLine, match=why):
        read_line(json.dumps(line).encode())


def test_groups_tell_what_their_members_were_worth(engine: Engine, imported: Importing) -> None:
    lines = [{"messages": [USER, ANSWER], "group_id": "g", "reward": reward} for reward in (0, 1, None)]
    imported(*lines)
    (group,) = rows(engine, schema.groups)
    assert (group.size, group.rewarded, group.reward_mean, group.reward_spread) == (3, 2, 0.5, 0.5)


def test_what_was_exported_comes_in_again_as_it_was(
    engine: Engine, seed: Seed, database_url: str, tmp_path: Path
) -> None:
    tool = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    seed.group("g")
    seed.trajectory("a", "g", turns=3, reward=0.25, task="x", metadata={"a": [1, None, "ü"]})
    seed.trajectory("b", turns=0, split="eval", no_train=True, end_user="alice")
    seed.completion("b", 0, response={"role": "assistant", "content": None, "tool_calls": [tool]},
                    tools=[{"type": "function", "function": {"name": "look"}}])  # fmt: skip
    seed.completion("b", 1, new_messages=[{"role": "tool", "tool_call_id": "c", "content": "here"}])
    seed.completion("b", 2, follows="b-0")

    def exported(to: Path) -> dict[tuple[str, int], Row]:
        wanted = ExportOptions("trajectories", Filter("default"), frozenset({"eval", "no_train"}))
        with files.opened(str(to), "trajectories", ids=False) as sink:
            export(database_url, wanted, sink, lambda _: None)
        found = [json.loads(line) for line in to.read_text(encoding="utf-8").splitlines()]
        names = ("messages", "tools", "reward", "task", "metadata", "group_id", "split", "no_train", "end_user")
        return {(row["trajectory_id"], row["conversation"]): {name: row[name] for name in names} for row in found}

    before = exported(tmp_path / "before.jsonl")
    assert len(before) == 3
    with engine.begin() as connection:
        for table in (schema.completions, schema.trajectories, schema.groups):
            connection.execute(table.delete())
    wanted = ImportOptions(tmp_path / "before.jsonl", "default", "imported")
    outcome = run(engine, wanted, check(wanted, lambda _: None), lambda _: None)
    assert (outcome.counted["trajectories"], outcome.counted["completions"]) == (2, 6)
    assert exported(tmp_path / "after.jsonl") == before


def test_no_sweep_and_no_step_takes_what_was_imported_but_supervised_ones_do(
    engine: Engine, seed: Seed, imported: Importing
) -> None:
    imported(*({"messages": [USER, {**ANSWER, "content": word}], "group_id": "g", "reward": reward}
               for word, reward in (("good", 1.0), ("bad", 0.0))))  # fmt: skip
    before = rows(engine, schema.trajectories)
    swept = sweep(engine, GroupSettings(), datetime.now(UTC) + timedelta(days=2))
    assert (swept.placed, swept.idle, swept.groups, swept.scored) == (0, 0, 0, 0)
    assert rows(engine, schema.trajectories) == before
    claim = Claim(
        project="default", policy="starter", number=1, attempt=1, version_in=0, version_out=1, adapter_in=None,
        created_at=NOW, baselined=0, kind="sft", asked_at=None, wanted=None,
    )  # fmt: skip
    with engine.connect() as connection:
        found = find(connection, claim, ExampleSelection("imported", 0.5, 10))
    good = next(row for row in before if row.reward == 1.0)
    assert [one.trajectory_id for one in found] == [good.id]


def test_a_policy_that_answers_takes_no_log(engine: Engine, seed: Seed, imported: Importing) -> None:
    with pytest.raises(NotImportable, match="answers apps"):
        imported({"messages": [USER, ANSWER]}, policy="starter")
    assert rows(engine, schema.trajectories) == []


def test_a_policy_that_keeps_a_log_is_not_made_to_answer(engine: Engine, imported: Importing) -> None:
    imported({"messages": [USER, ANSWER]}, policy="second")
    with pytest.raises(SettingsError, match="an imported log is stored under that name"):
        Store(engine).prepare(Settings(policy="second"))


def test_a_trajectory_that_an_app_made_is_never_added_to(engine: Engine, seed: Seed, imported: Importing) -> None:
    seed.trajectory("t")
    before = rows(engine, schema.completions)
    outcome = imported({"messages": [USER, ANSWER], "trajectory_id": "t"})
    assert (outcome.counted["taken"], rows(engine, schema.completions)) == (1, before)


def test_who_asked_to_be_forgotten_does_not_come_back(engine: Engine, seed: Seed, imported: Importing) -> None:
    seed.insert(
        schema.erasures, project="default", id="e", kind="user", target=pseudonym("alice"), asked_at=NOW,
        finished_at=NOW, trajectories=0, completions=0, versions={},
    )  # fmt: skip
    old, new = (call([USER], "hello", request={"user": "alice"}, timestamp=when) for when in
                ("2025-12-31T00:00:00Z", "2026-01-02T00:00:00Z"))  # fmt: skip
    outcome = imported(old, new)
    assert (outcome.counted["erased"], outcome.counted["trajectories"]) == (1, 1)


def test_what_goes_on_from_something_deleted_does_not_bring_it_back(
    engine: Engine, seed: Seed, imported: Importing
) -> None:
    """Each later call of a conversation repeats its words."""
    times = [f"2025-12-31T00:00:0{second}Z" for second in range(3)]
    asked = [([USER], "hello"), ([USER, ANSWER, USER], "again"), ([USER], "else")]
    lines = [call(*one, timestamp=when) for one, when in zip(asked, times, strict=True)]
    assert imported(*lines).counted["trajectories"] == 2
    (first, _) = sorted(rows(engine, schema.trajectories), key=lambda row: -row.completions)
    assert first.completions == 2
    erase(engine, erasing(Target("default", "trajectory", first.id), datetime.now(UTC)))
    again = imported(*lines)
    assert (again.counted["erased"], again.counted["there"], again.counted["completions"]) == (2, 1, 0)


def test_a_group_of_an_apps_takes_none_of_a_log(engine: Engine, seed: Seed, imported: Importing) -> None:
    seed.trajectory("t", group_id=seed.group())
    imported({"messages": [USER, ANSWER], "group_id": "g", "reward": 1e-200})
    (mine,) = [row for row in rows(engine, schema.trajectories) if row.policy == "imported"]
    assert mine.group_id not in (None, "g")
    (group,) = [row for row in rows(engine, schema.groups) if row.id == mine.group_id]
    assert (group.state, group.size, group.reward_spread) == ("discarded", 1, 0.0)


def test_what_can_be_read_only_once_is_no_log(engine: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidLog, match="read twice"):
        check(ImportOptions(tmp_path / "pipe", "default", "imported"), lambda _: None)


def test_one_bad_line_keeps_the_whole_file_out(engine: Engine, imported: Importing) -> None:
    with pytest.raises(InvalidLog) as caught:
        imported({"messages": [USER, ANSWER]}, "{", {"messages": [USER]}, {"messages": [ANSWER], "reward": "much"})
    said = str(caught.value)
    assert said.startswith("3 of 4 lines of ")
    assert "line 2: no JSON" in said
    assert "line 3: the last message must be the assistant's" in said
    assert "line 4: reward must be a finite number" in said
    assert rows(engine, schema.trajectories) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "must be a JSON object"),
        ("{}", 'neither "messages" nor'),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": [{"role": "bot", "content": ""}]}', "role must be one of"),
        ('{"messages": [{"role": "assistant"}]}', "says nothing"),
        ('{"messages": [{"role": "assistant", "content": 1}]}', "content must be text"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "no JSON"),
        ('{"request": {"messages": [{"role": "user", "content": ""}]}, "response": {"content": []}}', 'no "choices"'),
        ('{"request": 1, "response": {"choices": [{}]}}', '"request" must be an object'),
        ('{"messages": [{"role": "assistant", "content": ""}], "trajectory_id": "a b"}', "trajectory_id must be"),
        ('{"messages": [{"role": "assistant", "content": ""}], "split": "test"}', "split must be"),
        ('{"messages": [{"role": "assistant", "content": ""}], "created_at": "soon"}', "is no time"),
        ('{"messages": [{"role": "assistant", "content": ""}], "reward": 1e12}', "reward must be"),
        ("[" * 10_000, "no JSON"),
    ],
)
def test_a_line_that_cannot_be_meant_says_why(line: str, why: str) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(line.encode())
    assert why in str(caught.value)


def test_a_reward_may_lie_deep_and_be_yes_or_no() -> None:
    line = json.dumps({"messages": [USER, ANSWER], "scores": {"helpful": True}}).encode()
    assert read_line(line, "scores.helpful")[0].tags.reward == 1.0
    assert read_line(line)[0].tags.reward is None


def test_calls_without_an_answer_are_counted_and_left_out(engine: Engine, imported: Importing) -> None:
    refused = {"request": {"messages": [USER]}, "response": {"error": {"message": "busy"}}}
    wrapped = {"request": {"body": call([USER], "a")["request"]}, "response": {"body": call([USER], "a")["response"]}}
    outcome = imported(refused, {"request": {"messages": [USER]}, "response": None}, wrapped)
    assert (outcome.unanswered, outcome.counted["trajectories"]) == (2, 1)


def test_nul_characters_and_odd_texts_reach_both_databases(engine: Engine, imported: Importing) -> None:
    imported({"messages": [USER, {"role": "assistant", "content": "a\x00b \\u0000 ü \u2028"}]})
    (row,) = rows(engine, schema.completions)
    assert row.response_text == "a\ufffdb \\u0000 ü \u2028"


def test_words_are_stored_once_and_those_of_parts_beside_their_message(engine: Engine, imported: Importing) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "image_url"}, {"type": "text", "text": "lo"}]
    tool = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    for content in ("hello", "", parts, None):
        message = {"role": "assistant", "content": content} | ({"tool_calls": [tool]} if content is None else {})
        imported({"messages": [{"role": "user", "content": f"{content}"}, message]})
    with engine.connect() as connection:
        stored = connection.scalars(select(schema.completions.c.response_text)).all()
        shown = connection.scalars(text("SELECT response_text FROM admin_completions")).all()
    assert Counter(stored) == Counter([None, None, None, "hello"])
    assert Counter(shown) == Counter(["hello", "", "hello", None])


def test_answers_of_weight_zero_are_part_of_what_was_asked(engine: Engine, imported: Importing) -> None:
    imported({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]})
    (row,) = rows(engine, schema.completions)
    assert row.new_messages == [USER, ANSWER, USER]
