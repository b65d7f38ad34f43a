"""`whetstone export`: what a filter matches, whole or not at all, with what was left out told."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from migrations import schema
from tests.conftest import Seed
from whetstone.transfer.exporting import files
from whetstone.transfer.exporting.exporter import ExportOptions, FilterRefused, run
from whetstone.transfer.exporting.files import CannotWrite
from whetstone.transfer.exporting.rows import Tally
from whetstone.transfer.exporting.store import Filter

Exporting = Callable[..., tuple[list[dict[str, Any]], Tally]]


@pytest.fixture
def exported(seed: Seed, database_url: str, tmp_path: Path) -> Exporting:
    """Exports, and gives the rows of the file and what was left out."""

    def run_it(kind: Any, **given: Any) -> tuple[list[dict[str, Any]], Tally]:
        names = ("policy", "split", "task", "where", "query")
        matching = Filter("default", **{name: given.pop(name) for name in names if name in given})
        to = tmp_path / "out.jsonl"
        with files.opened(str(to), kind, ids=given.get("ids", False)) as rows:
            tally = run(database_url, ExportOptions(kind, matching, **given), rows, lambda _: None)
        return [json.loads(line) for line in to.read_text(encoding="utf-8").splitlines()], tally

    return run_it


def spoken(seed: Seed, trajectory_id: str, answers: list[str], **values: Any) -> None:
    """A trajectory whose turns answer so."""
    seed.trajectory(trajectory_id, turns=0, completions=len(answers), **values)
    for turn, answer in enumerate(answers):
        seed.completion(trajectory_id, turn, response={"role": "assistant", "content": answer, "tool_calls": []})


def test_a_trajectory_is_the_conversation_it_was(seed: Seed, exported: Exporting) -> None:
    seed.group("g")
    seed.trajectory("t", "g", turns=2, reward=0.5, task="x", metadata={"a": [1]})
    (row,), tally = exported("trajectories")
    assert [(one["role"], one["content"]) for one in row["messages"]] == [
        ("user", "question 0"), ("assistant", "answer 0"), ("user", "question 1"), ("assistant", "answer 1"),
    ]  # fmt: skip
    assert (row["trajectory_id"], row["group_id"], row["reward"], row["task"]) == ("t", "g", 0.5, "x")
    assert (row["versions"], row["completion_ids"], row["metadata"]) == ([0, 0], ["t-0", "t-1"], {"a": [1]})
    assert "token_ids" not in row
    assert (tally.rows, dict(tally.left_out)) == (1, {})


def test_ids_come_as_one_row_that_says_what_was_sampled(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=2)
    (row,), _ = exported("trajectories", ids=True)
    assert row["token_ids"] == [1, 2, 3, 4, 11, 12, 13, 14]
    assert row["sampled"] == [False, False, True, True, False, False, True, True]
    assert row["inference_logprobs"] == [None, None, -0.5, -0.25, None, None, -0.5, -0.25]


def test_where_ids_are_missing_they_are_null_and_not_empty(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=1)
    seed.completion("t", 1, inference_logprobs=None)
    (row,), _ = exported("trajectories", ids=True)
    assert (row["token_ids"], row["sampled"], row["inference_logprobs"]) == (None, None, None)


def test_an_app_that_went_on_from_two_places_leaves_two_conversations(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=2)
    seed.completion("t", 2, follows="t-0")
    rows, _ = exported("trajectories")
    assert [(row["conversation"], row["completion_ids"]) for row in rows] == [(0, ["t-0", "t-1"]), (1, ["t-0", "t-2"])]


def test_what_broke_off_or_was_asked_again_ends_no_conversation(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=1)
    seed.completion("t", 1, status="aborted", response=None)
    seed.completion("t", 2, follows="t-0", why_not_trained="superseded")
    (row,), _ = exported("trajectories")
    assert row["completion_ids"] == ["t-0"]


def test_tools_are_those_of_the_last_turn_that_named_any(seed: Seed, exported: Exporting) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    seed.trajectory("t", turns=0)
    seed.completion("t", 0, tools=tools)
    seed.completion("t", 1)
    (row,), _ = exported("trajectories")
    assert row["tools"] == tools


def test_what_is_not_to_be_trained_on_stays_out_unless_it_is_asked_for(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("train")
    seed.trajectory("eval", split="eval")
    seed.trajectory("no", no_train=True)
    seed.trajectory("again", why_not_trained="superseded")
    seed.trajectory("empty", turns=0)
    seed.trajectory("private", turns=0)
    seed.completion("private", 0, why_not_trained="redacted")
    rows, tally = exported("trajectories")
    assert [row["trajectory_id"] for row in rows] == ["train"]
    assert dict(tally.left_out) == dict.fromkeys(("eval", "no_train", "superseded", "empty", "redacted"), 1)
    rows, tally = exported("trajectories", include=frozenset({"eval", "no_train", "redacted"}))
    assert {row["trajectory_id"] for row in rows} == {"train", "eval", "no", "private"}
    assert dict(tally.left_out) == {"superseded": 1, "empty": 1}


@pytest.mark.parametrize(
    "given",
    [
        {"where": "reward > 0.5 AND task = 'x'"},
        {"where": "task = 'x' -- and whatever"},
        {"where": "admin_trajectories.metadata IS NULL AND trajectory_id LIKE 'a%' OR task = ':x'"},
        {"query": "SELECT trajectory_id FROM admin_completions WHERE trajectory_id = 'a';"},
        {"task": "x"},
        {"policy": "starter", "where": "reward = 1"},
    ],
    ids=str,
)
def test_filters_are_sql_over_the_view(seed: Seed, exported: Exporting, given: dict[str, Any]) -> None:
    seed.trajectory("a", reward=1.0, task="x")
    seed.trajectory("b", reward=0.0, task="y")
    rows, _ = exported("trajectories", **given)
    assert [row["trajectory_id"] for row in rows] == ["a"]


def test_a_filter_cannot_leave_its_project(seed: Seed, exported: Exporting) -> None:
    seed.project("other")
    seed.trajectory("theirs", project="other")
    seed.trajectory("ours")
    for given in ({"where": "1 = 1) OR (1 = 1"}, {"query": "SELECT trajectory_id FROM admin_trajectories"}):
        rows, _ = exported("trajectories", **given)
        assert [row["trajectory_id"] for row in rows] == ["ours"]


@pytest.mark.parametrize("where", ["rewrd > 1", "1 = 1); DELETE FROM trajectories; SELECT (1 = 1", "reward >"])
def test_a_filter_that_is_none_is_refused_and_leaves_no_file(
    seed: Seed, exported: Exporting, tmp_path: Path, where: str
) -> None:
    seed.trajectory("t")
    with pytest.raises(FilterRefused):
        exported("trajectories", where=where)
    assert seed.one(schema.trajectories, "t")
    assert not list(tmp_path.glob("*out*"))


def test_a_pair_is_the_best_against_the_worst_of_a_group(seed: Seed, exported: Exporting) -> None:
    seed.group("g")
    for name, reward, answer in (("bad", 0.0, "no"), ("good", 1.0, "yes"), ("soso", 0.5, "well")):
        spoken(seed, name, [answer], group_id="g", reward=reward, task="x")
    (row,), _ = exported("preferences")
    assert row["prompt"] == [{"role": "user", "content": "question 0"}]
    assert row["chosen"] == [{"role": "assistant", "content": "yes"}]
    assert row["rejected"] == [{"role": "assistant", "content": "no"}]
    assert (row["chosen_reward"], row["rejected_reward"], row["group_id"], row["task"]) == (1.0, 0.0, "g", "x")
    assert (row["chosen_trajectory_id"], row["rejected_trajectory_id"]) == ("good", "bad")
    rows, _ = exported("preferences", all_pairs=True)
    pairs = {(row["chosen_trajectory_id"], row["rejected_trajectory_id"]) for row in rows}
    assert pairs == {("good", "soso"), ("good", "bad"), ("soso", "bad")}
    rows, _ = exported("preferences", all_pairs=True, min_gap=0.75)
    assert [(row["chosen_trajectory_id"], row["rejected_trajectory_id"]) for row in rows] == [("good", "bad")]


def test_the_prompt_of_a_pair_ends_where_its_answers_part(seed: Seed, exported: Exporting) -> None:
    seed.group("g")
    spoken(seed, "good", ["hello", "yes"], group_id="g", reward=1.0)
    spoken(seed, "bad", ["hello", "no"], group_id="g", reward=0.0)
    (row,), _ = exported("preferences")
    assert [one["content"] for one in row["prompt"]] == ["question 0", "hello", "question 1"]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("yes", "no")


def test_what_makes_no_pair_is_counted_by_its_reason(seed: Seed, exported: Exporting) -> None:
    for group in ("alone", "equal", "other", "unrewarded"):
        seed.group(group)
    spoken(seed, "a", ["yes"], group_id="alone", reward=1.0)
    spoken(seed, "a2", ["no"], group_id="alone", reward=0.0, split="eval")
    spoken(seed, "e", ["yes"], group_id="equal", reward=1.0)
    spoken(seed, "e2", ["no"], group_id="equal", reward=1.0)
    spoken(seed, "o", ["yes"], group_id="other", reward=1.0)
    seed.trajectory("o2", "other", turns=0, reward=0.0)
    seed.completion("o2", 0, new_messages=[{"role": "user", "content": "something else"}])
    spoken(seed, "u", ["yes"], group_id="unrewarded")
    rows, tally = exported("preferences")
    assert rows == []
    assert dict(tally.left_out) == {"eval": 1, "alone": 1, "gap": 1, "prompts_differ": 1}


def test_sft_rows_are_the_best_of_each_group_that_beat_another(seed: Seed, exported: Exporting) -> None:
    seed.group("g")
    seed.group("equal")
    spoken(seed, "good", ["yes"], group_id="g", reward=1.0)
    spoken(seed, "bad", ["no"], group_id="g", reward=0.0)
    spoken(seed, "same", ["yes"], group_id="equal", reward=1.0)
    spoken(seed, "same2", ["yes"], group_id="equal", reward=1.0)
    spoken(seed, "single", ["yes"], reward=1.0)
    (row,), tally = exported("sft")
    assert row["messages"][-1] == {"role": "assistant", "content": "yes"}
    assert (row["trajectory_id"], row["source"], row["reward"]) == ("good", "best", 1.0)
    assert dict(tally.left_out) == {"gap": 1}
    rows, _ = exported("sft", min_reward=1.0)
    assert {row["trajectory_id"] for row in rows} == {"good", "same", "same2", "single"}


def test_answers_that_were_cut_off_are_not_imitated_unless_they_are_asked_for(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=0, reward=1.0)
    seed.completion("t", 0, finish_reason="length")
    rows, tally = exported("sft", min_reward=1.0)
    assert (rows, dict(tally.left_out)) == ([], {"cut_off": 1})
    rows, _ = exported("sft", min_reward=1.0, include=frozenset({"cut_off"}))
    assert len(rows) == 1


def test_another_dialect_than_chat_is_no_example(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=0, reward=1.0)
    seed.completion("t", 0, endpoint="messages")
    rows, tally = exported("sft", min_reward=1.0)
    assert (rows, dict(tally.left_out)) == ([], {"not_a_chat": 1})
    assert len(exported("trajectories")[0]) == 1


def test_a_demonstration_stands_in_place_of_the_answer_it_corrects(seed: Seed, exported: Exporting) -> None:
    seed.trajectory("t", turns=2)
    right = {"role": "assistant", "content": "right"}
    said = {"source": "demonstration", "demonstration": right, "state": "applied", "trajectory_id": "t"}
    seed.feedback("t-0", kind="completion", completion_id="t-0", **(said | {"demonstration": {"content": "old"}}))
    seed.feedback("t-0", kind="completion", completion_id="t-0", **said)
    seed.feedback("t", **(said | {"demonstration": {"content": "last"}}))
    seed.feedback("t", **(said | {"demonstration": {"content": "withdrawn"}, "withdrawn_at": seed.now}))
    rows, _ = exported("sft", source="demonstrations")
    told = {tuple(one["content"] for one in row["messages"]) for row in rows}
    assert told == {("question 0", "right"), ("question 0", "answer 0", "question 1", "last")}
    assert {row["source"] for row in rows} == {"demonstration"}
    assert exported("sft", source="best")[0] == []


def test_parquet_has_the_same_types_whatever_its_rows_hold(seed: Seed, database_url: str, tmp_path: Path) -> None:

    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    seed.trajectory("t", turns=0, reward=1.0, metadata={"n": 1})
    seed.completion(
        "t", 0, new_messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        response={"role": "assistant", "content": None, "tool_calls": [call], "odd": 7},
        finish_reason="tool_calls", tools=[{"type": "function"}],
    )  # fmt: skip
    seed.trajectory("media", turns=0, reward=1.0)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    seed.completion("media", 0, new_messages=[{"role": "user", "content": [image]}])
    schemas = []
    for where in ("1 = 1", "trajectory_id = 'nobody'"):
        to = tmp_path / "out.parquet"
        wanted = ExportOptions("trajectories", Filter("default", where=where), ids=True)
        with files.opened(str(to), wanted.kind, ids=True) as rows:
            tally = run(database_url, wanted, rows, lambda _: None)
        table = parquet.read_table(to)
        schemas.append(table.schema)
        if where == "1 = 1":
            (row,) = table.to_pylist()
            assert dict(tally.left_out) == {"not_tabular": 1}
    assert schemas[0] == schemas[1]
    user, answer = row["messages"]
    assert (user["content"], answer["content"], answer["tool_calls"]) == ("hi", None, [call])
    assert (answer["others"], row["tools"], row["metadata"]) == ('{"odd":7}', '[{"type":"function"}]', '{"n":1}')
    assert (row["token_ids"], row["inference_logprobs"]) == ([1, 2, 3, 4], [None, None, -0.5, -0.25])


@pytest.mark.parametrize(
    ("to", "told"), [("out.txt", ".jsonl or .parquet"), ("no/out.jsonl", "no folder"), ("there.jsonl", "--overwrite")]
)
def test_a_place_that_cannot_be_written_is_refused_with_what_to_do(tmp_path: Path, to: str, told: str) -> None:
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(CannotWrite, match=told):
        files.check(str(tmp_path / to), "sft", overwrite=False)


def test_ratings_name_their_rater_and_nothing_is_left_out_of_them(
    seed: Seed, exported: Exporting, database_url: str, tmp_path: Path
) -> None:
    seed.group("g")
    seed.trajectory("t", "g", task="x", last_version=3)
    seed.trajectory("held-out", split="eval", no_train=True)
    applied = {"trajectory_id": "t", "state": "applied"}
    seed.feedback("t", 0.75, metadata={"rater": "Anna", "score": 4, "n": [1]}, comment='=a, "b"\nc', **applied)
    demonstration = {"role": "assistant", "content": "At 12:15."}
    seed.feedback(
        "t-0", kind="completion", completion_id="t-0", metadata={"rater": 5}, demonstration=demonstration,
        source="demonstration", **applied,
    )  # fmt: skip
    seed.feedback("held-out", 0.0, trajectory_id="held-out", state="unused", metadata={"rater": "Ben"}, source="thumbs")
    seed.feedback("t", 1.0, metadata={"customer": 1}, **applied)
    seed.feedback("t", 1.0, metadata={"rater": "Anna"}, withdrawn_at=seed.now, **applied)
    rows, tally = exported("ratings")
    assert (tally.rows, dict(tally.left_out)) == (3, {})
    assert [(row["rater"], row["trajectory_id"], row["reward"], row["score"]) for row in rows] == [
        ("Anna", "t", 0.75, 4), ("5", "t", None, None), ("Ben", "held-out", 0.0, None),
    ]  # fmt: skip
    assert (rows[0]["policy"], rows[0]["version"], rows[0]["group_id"], rows[0]["task"]) == ("starter", 3, "g", "x")
    assert (rows[0]["metadata"], rows[1]["metadata"]) == ({"n": [1]}, None)
    assert (rows[1]["target"], rows[1]["completion_id"]) == ("completion", "t-0")
    assert (rows[1]["demonstration"], rows[2]["split"]) == ("At 12:15.", "eval")
    assert [row["rater"] for row in exported("ratings", task="x")[0]] == ["Anna", "5"]
    options = ExportOptions("ratings", Filter("default"))
    for name in ("ratings.csv", "ratings.parquet"):
        with files.opened(str(tmp_path / name), "ratings", ids=False) as sink:
            run(database_url, options, sink, lambda _: None)
    with (tmp_path / "ratings.csv").open(newline="", encoding="utf-8") as file:
        first, second, _ = csv.DictReader(file)
    assert list(first) == list(rows[0])
    assert (first["comment"], first["reward"], first["metadata"]) == ('=a, "b"\nc', "0.75", '{"n":[1]}')
    assert (second["reward"], second["demonstration"]) == ("", "At 12:15.")
    table = parquet.read_table(tmp_path / "ratings.parquet").to_pylist()
    assert [row["score"] for row in table] == [4, None, None]


def test_only_ratings_can_be_csv(tmp_path: Path) -> None:
    files.check(str(tmp_path / "out.csv"), "ratings", overwrite=False)
    with pytest.raises(CannotWrite, match="only ratings can be CSV"):
        files.check(str(tmp_path / "out.csv"), "trajectories", overwrite=False)


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    to = tmp_path / "out.jsonl"
    to.write_text("old\n")
    with pytest.raises(RuntimeError), files.opened(str(to), "sft", ids=False) as rows:
        rows.add({"a": 1})
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert to.read_text() == "old\n"
