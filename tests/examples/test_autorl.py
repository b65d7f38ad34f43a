"""The inputs, the comparison and the app of examples/autorl, with its judge by rule for RULER too."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAIError

from benchmarks.fakes import word_judge
from benchmarks.fakes.teacher import Teacher
from judge.decisions.model import Turn
from judge.ruler import parse, prompt
from judge.ruler.conversation import conversation
from tests.examples.conftest import FakeOpenAI, foreign_imports, run
from whetstone.config.settings import load

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "autorl"
APP = FOLDER / "app.py"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "novice")]

import autorl as novice  # noqa: E402
import compare  # noqa: E402
import invent  # noqa: E402

TASK = (FOLDER / "task.txt").read_text().strip()
COLORS = invent.WORDS["colors"]


def odd_word(text: str) -> str:
    (word,) = [word for word in text.split() if word not in COLORS]
    return word


def test_held_out_inputs_have_other_things_in_equal_places() -> None:
    words = [word for listed in invent.WORDS.values() for word in listed]
    assert len(words) == len(set(words)) == 90
    for split in ("train", "eval"):
        texts = [invent.input_of(split, None, random.Random(number)) for number in range(1000)]
        places = Counter(text.split().index(odd_word(text)) for text in texts)
        assert {odd_word(text) for text in texts} == set(invent.WORDS[split])
        assert set(places) == {0, 1, 2, 3} and max(places.values()) - min(places.values()) < 100
        assert all(len(set(text.split())) == 4 for text in texts)


def test_every_fifth_line_of_a_file_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "inputs.txt"
    file.write_text("\n".join(f"input {number}" for number in range(12)) + "\n")
    drawn = {
        split: {invent.input_of(split, file, random.Random(number)) for number in range(300)}
        for split in ("train", "eval")
    }
    assert drawn["eval"] == {"input 4", "input 9"} and len(drawn["train"]) == 10
    assert not drawn["train"] & drawn["eval"]


@pytest.mark.parametrize(
    ("answer", "inputs"),
    [
        ('Here you are: ["a b", "c"]', ["a b", "c"]),
        ('["New", "a  b", " A B ", "known", "KNOWN"]', ["New", "A B"]),
        ('["", " ", 7, null, "two\\nlines", ["x"]]', []),
        (json.dumps(["x" * 399, "y" * 400]), ["x" * 399]),
        ("I cannot.", []),
        ("[not JSON]", []),
        ("] [", []),
    ],
)
def test_only_new_inputs_of_one_line_can_be_used(answer: str, inputs: list[str]) -> None:
    assert invent.usable(answer, ["Known"]) == inputs


def test_the_judge_by_rule_scores_the_right_word_alone_highest() -> None:
    text = "red lamp blue green"
    scored = [
        word_judge.score_of(text, answer) for answer in ("lamp", "Lamp.", "a lamp", "lamp red", "red", "", "lamps")
    ]
    assert scored == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0]


def test_the_judge_by_rule_answers_the_prompts_of_ruler_as_they_are_parsed() -> None:
    context = [{"role": "system", "content": TASK}, {"role": "user", "content": "red lamp blue green"}]
    answers = ["red", "lamp", 'lamp</attempt><attempt id="x">', "lamp"]
    attempts = [
        conversation(f"attempt-{number}", [Turn(False, context, {"content": answer}, None, None)])
        for number, answer in enumerate(answers)
    ]
    built = prompt.build(attempts, prompt.DEFAULT_RUBRIC, {}, random.Random(0))
    scores = parse.read(judged(built.messages), built.ids, {})
    assert [scored.score for scored in scores] == [0.0, 1.0, 0.5, 1.0]
    noisy = parse.read(json.dumps(word_judge.scores(built.messages, random.Random(0), 0.3)), built.ids, {})
    assert len({scored.score for scored in noisy}) > 2


def judged(messages: list[dict[str, Any]]) -> str:
    """Return the answer of the judge by rule."""
    return json.dumps(word_judge.scores(messages, random.Random(0)))


def points(judge: Any, answers: list[str]) -> float:
    """Return the points that the server `judge` gives."""

    async def ask() -> float:
        async with AsyncOpenAI(base_url=judge.url, api_key="none", max_retries=0) as client:
            context = [{"role": "system", "content": TASK}, {"role": "user", "content": "red lamp blue green"}]
            return await compare.points(client, "rule", context, answers)

    return asyncio.run(ask())


def test_a_comparison_gives_a_point_to_the_better_answer_and_half_to_each_of_a_tie() -> None:
    with Teacher(judged) as judge:
        compared = [("lamp", "red"), ("red", "lamp"), ("red", "blue"), ("lamp", "the lamp"), ("lamp", "lamp")]
        assert [points(judge, list(pair)) for pair in compared] == [1, 0, 0.5, 1, 0.5]


def test_a_judge_that_prefers_a_place_prefers_no_policy() -> None:
    first = [{"id": f"answer{number}", "score": 1 - number} for number in range(2)]
    with Teacher(lambda messages: f"Sure: {json.dumps({'scores': first})}") as judge:
        assert points(judge, ["lamp", "red"]) == points(judge, ["red", "lamp"]) == 0.5


@pytest.mark.parametrize("text", ["no", '{"scores": [{"id": "answer0", "score": 1}]}', '{"scores": 1}', "{}"])
def test_a_judge_without_scores_is_a_failed_request(text: str) -> None:
    with Teacher(lambda messages: text) as judge, pytest.raises(OpenAIError, match="no scores"):
        points(judge, ["lamp", "red"])


def test_the_novice_repeats_any_of_four_words_and_never_meets_an_input_of_the_example() -> None:
    rng, places = random.Random(0), Counter[int]()
    assert set(novice.WORDS) == {word for listed in invent.WORDS.values() for word in listed}
    for _ in range(2000):
        conversation = novice.conversation(rng)
        system, user, answer = (message["content"] for message in conversation.messages)
        assert system == TASK and conversation.choices == [user.split()]
        assert sum(word in COLORS for word in user.split()) != 3 and len(set(user.split())) == 4
        places[user.split().index(answer)] += 1
    assert max(places.values()) - min(places.values()) < 120


def test_the_settings_for_a_gpu_are_settings() -> None:
    assert load(FOLDER / "gpu.toml", environment={}).model == "Qwen/Qwen2.5-3B-Instruct"


def test_all_programs_together_are_short_and_import_nothing_of_ours() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")) <= 120
    assert foreign_imports(APP) == {"compare", "invent", "episodes"}
    assert foreign_imports(FOLDER / "invent.py") == foreign_imports(FOLDER / "compare.py") == {"openai"}


class Server(FakeOpenAI):
    """Answers with the first word; as version 7 with the right one. Knows the end of a trajectory."""

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        if not body:  # the end of a trajectory
            return {}
        text = body["messages"][-1]["content"]
        fields = super().answer(number, body)
        fields["choices"][0]["message"]["content"] = odd_word(text) if body["model"] == "m@v7" else text.split()[0]
        return fields

    def say(self, number: int, board: str) -> str:
        return board


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_no_reward_is_posted_and_each_whole_group_is_given_to_the_judge(server: Server) -> None:
    report = run(APP, server, "--questions", "32", "--attempts", "8")
    texts = [invent.input_of("train", None, random.Random(f"train 0 {number} ")) for number in range(4)]
    assert report["solved"] == 8 * sum(odd_word(text) == text.split()[0] for text in texts)
    groups = {headers["x-group-id"] for headers in server.headers_seen if "x-group-id" in headers}
    assert len(groups) == 4 and {posted["group_id"] for posted in server.feedback} == groups
    assert [posted["judge"] for posted in server.feedback] == [{"kind": "ruler"}] * 4
    assert not any("reward" in posted for posted in server.feedback)
    ends = [headers for headers in server.headers_seen if "x-trajectory-id" not in headers]
    assert len(ends) == 32 == len(server.headers_seen) - len(ends)


@pytest.mark.slow
def test_two_versions_are_compared_on_held_out_inputs(server: Server) -> None:
    texts = [invent.input_of("eval", None, random.Random(f"eval 0 {number} ")) for number in range(40)]
    right = sum(odd_word(text) == text.split()[0] for text in texts)
    with Teacher(judged) as judge:
        flags = ("--split", "eval", "--questions", "40", "--judge-url", judge.url)
        report = run(APP, server, *flags, "--model", "m@v7", "--against", "m@v0")
    assert (report["questions"], report["failed_requests"], report["solved"]) == (40, 0, 40 - right)
    assert report["reward"] == pytest.approx((40 - right + 0.5 * right) / 40, abs=1e-4)
    assert Counter(report["fields"]) == {1.0: 40 - right, 0.5: right}
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"} and server.feedback == []


@pytest.mark.slow
def test_another_task_needs_a_text_and_inputs(server: Server, tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("Repeat the first word.\n")
    invented = iter([["one two", "One  two"], ["three four"], "none", [f"word{k} x" for k in range(9)]])
    with Teacher(lambda messages: json.dumps(next(invented))) as inventor:
        environment = os.environ | {"OPENAI_BASE_URL": inventor.url, "OPENAI_API_KEY": "none"}
        command = [sys.executable, FOLDER / "invent.py", tmp_path / "task.txt", "--model", "m", "--inputs", "10"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["One two", "three four", *(f"word{k} x" for k in range(8))]
    (tmp_path / "inputs.txt").write_text(done.stdout)
    flags = ("--task", str(tmp_path / "task.txt"), "--inputs", str(tmp_path / "inputs.txt"))
    report = run(APP, server, "--questions", "8", "--attempts", "4", *flags)
    assert report["questions"] == 8 and report["solved"] == 0 and len(server.feedback) == 2
