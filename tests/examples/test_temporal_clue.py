"""The puzzles and the app of examples/temporal_clue: one answer each, by brute force; the app on a real socket."""

import itertools
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import FakeOpenAI, foreign_imports, run
from whetstone.config.settings import load

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-examples" / "bin" / "python"
FOLDER = ROOT / "examples" / "temporal_clue"
APP = FOLDER / "app.py"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "novice")]

import clues  # noqa: E402
import temporal_clue as novice  # noqa: E402

PREPARED = ("2x2", "2x3", "3x3", "3x3x2", "4x4x3x3")
Rooms = dict[tuple[str, str], str]
"""Suspect and time -> room; in the small form the time is always the same."""
World = tuple[Rooms, dict[str, str]]
"""And question -> right word."""

CLUES: dict[str, Callable[[World, tuple[str, ...]], bool]] = {
    r"(\w+) in (\w+)": lambda world, words: world[0][words[0], ""] == words[1],
    r"(\w+) with (\w+)": lambda world, words: world[0][words[0], ""] == world[0][words[1], ""],
    r"At (\w+), (\w+) was in the (\w+)": lambda world, words: world[0][words[1], words[0]] == words[2],
    r"At (\w+), (\w+) was in the same room as (\w+)": (
        lambda world, words: world[0][words[1], words[0]] == world[0][words[2], words[0]]
    ),
    r"(\w+) was in the same room at (\w+) and at (\w+)": (
        lambda world, words: world[0][words[0], words[1]] == world[0][words[0], words[2]]
    ),
    r"At (\w+), none of the suspects was in the (\w+)": (
        lambda world, words: all(room != words[1] for (_, time), room in world[0].items() if time == words[0])
    ),
    r"At (\w+), at least one of the suspects was in the (\w+)": (
        lambda world, words: any(room == words[1] for (_, time), room in world[0].items() if time == words[0])
    ),
    r"(\w+) is the murderer": lambda world, words: world[1]["Who"] == words[0],
    r"The murder did happen in the (\w+)": lambda world, words: world[1]["Where"] == words[0],
    r"The murder did happen at (\w+)": lambda world, words: world[1]["When"] == words[0],
}
"""What a sentence says, without "not"."""


def is_true(sentence: str, world: World) -> bool:
    """Return whether a clue is true, as a reader of its words takes it."""
    affirmed = sentence.removesuffix(".").replace("not ", "")
    for pattern, holds in CLUES.items():
        if match := re.fullmatch(pattern, affirmed):
            return holds(world, match.groups()) == ("not " not in sentence)
    raise AssertionError(sentence)


def worlds(task: clues.Task) -> Iterator[World]:
    """Return every world of a task without weapons."""
    small = not task.size.is_murder
    rooms = clues.LETTERS[: task.size.rooms] if small else task.options["Where"]
    suspects = task.questions if small else task.options["Who"]
    times = ("",) if small else task.options["When"]
    keys = list(itertools.product(suspects, times))
    for placed in itertools.product(rooms, repeat=len(keys)):
        there = dict(zip(keys, placed, strict=True))
        if small:
            yield there, {suspect: there[suspect, ""] for suspect in suspects}
            continue
        for who, time in keys:
            if sum(there[suspect, time] == there[who, time] for suspect in suspects) == 1:
                yield there, {"Who": who, "Where": there[who, time], "When": time}


def answers(task: clues.Task, possible: list[World], sentences: list[str]) -> set[tuple[str, ...]]:
    """Return the answers that these sentences leave."""
    left = [world for world in possible if all(is_true(sentence, world) for sentence in sentences)]
    return {tuple(world[1][question] for question in task.questions) for world in left}


@pytest.mark.parametrize(("text", "tasks"), [("2x2", 40), ("2x3", 40), ("3x3", 40), ("3x3x2", 2)])
def test_a_puzzle_has_one_answer_and_no_clue_that_is_not_needed(text: str, tasks: int) -> None:
    size = clues.Size.of(text)
    for number in range(tasks):
        task = clues.task(size, "train", random.Random(number))
        possible = list(worlds(task))
        words = [
            task.options[question][clues.LETTERS.index(letter)] if task.options else letter
            for question, letter in zip(task.questions, task.letters, strict=True)
        ]
        assert answers(task, possible, task.clues) == {tuple(words)}
        for clue in task.clues:
            assert len(answers(task, possible, [other for other in task.clues if other != clue])) > 1, clue


@pytest.mark.parametrize("text", PREPARED)
def test_prepared_puzzles_are_small_different_and_true(text: str) -> None:
    size = clues.Size.of(text)
    puzzles = clues.stored(size)
    assert (clues.FOLDER / f"{text}.json").stat().st_size <= 200_000
    assert len(puzzles) == len({str(puzzle) for puzzle in puzzles}) == (64 if text == "2x2" else 400)
    letters = [set(column) for column in zip(*(answer for _, answer in puzzles), strict=True)]
    counts = [size.suspects, size.rooms, size.times, size.weapons] if size.is_murder else [size.rooms] * size.suspects
    assert letters == [set(range(count)) for count in counts if count]


def test_held_out_puzzles_have_other_names_and_other_clues() -> None:
    assert not set(clues.NAMES["train"]) & set(clues.NAMES["eval"])
    without_names: dict[clues.Split, set[str]] = {"train": set(), "eval": set()}
    splits: tuple[clues.Split, ...] = ("train", "eval")
    for split in splits:
        for number in range(300):
            task = clues.task(clues.Size(2, 2), split, random.Random(number))
            text = " ".join(task.clues)
            for k, name in enumerate(task.questions):
                text = text.replace(name, f"suspect{k}")
            without_names[split].add(text)
    assert len(without_names["eval"]) == 16 and not without_names["train"] & without_names["eval"]


@pytest.mark.parametrize("text", ["2x2", "2x3", "3x3"])
def test_no_letter_is_right_more_often_than_another_in_either_split(text: str) -> None:
    size = clues.Size.of(text)
    splits: tuple[clues.Split, ...] = ("train", "eval")
    for split in splits:
        answers = [clues.task(size, split, random.Random(number)).letters for number in range(2000)]
        for letters in zip(*answers, strict=True):
            counts = Counter(letters)
            assert all(abs(counts[letter] / 2000 - 1 / size.rooms) < 0.04 for letter in clues.LETTERS[: size.rooms])


def test_a_size_that_cannot_be_is_refused() -> None:
    assert str(clues.Size.of("full")) == str(clues.Size.of("4x4x3x3")) == "4x4x3x3"
    for text in ("1x2", "2x1", "2x2x2x3", "2", "2x20", "2x2x9", "2x2x0x1", "two"):
        with pytest.raises((ValueError, TypeError)):
            clues.Size.of(text)


def test_the_same_generator_gives_the_same_task() -> None:
    size = clues.Size.of("4x4x3x3")
    first, again, other = (clues.task(size, "train", random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_each_letter_counts_and_the_last_of_several_is_taken() -> None:
    small = clues.Task(clues.Size(2, 2), ["Ann in A.", "Bob not in A."], ("Ann", "Bob"), ("A", "B"), {})
    assert small.messages[-1]["content"] == "Ann in A. Bob not in A.\nAnn? Bob?"
    assert [small.share(text) for text in ("Ann in A. Bob in B.", "Ann in A. Bob in A.", "Bob in B", "A B", "")] == [
        1, 0.5, 0.5, 0, 0,
    ]  # fmt: skip
    options = {"Who": ("Ann", "Bob"), "Where": ("den", "hall"), "When": ("seven", "eight")}
    murder = clues.Task(clues.Size(2, 2, 2), [], ("Who", "Where", "When"), ("A", "B", "A"), options)
    assert "Where: A den, B hall" in murder.messages[-1]["content"]
    assert murder.share("If Who: B, then ...\nWho: A\nWhere: B\nWhen: B") == 2 / 3


def by_rule(prompt: str) -> str:
    """Answer with the room in a suspect's own clue, the other one if it is denied, and any if there is no such clue."""
    text, names = prompt.split("\n")
    answer, rng = [], random.Random(prompt)
    for name in re.findall(r"(\w+)\?", names):
        match = re.search(rf"{name} (not )?in ([AB])", text)
        denied, room = (match[1], match[2]) if match else (None, rng.choice("AB"))
        answer.append(f"{name} in {'BA'['AB'.index(room)] if denied else room}.")
    return " ".join(answer)


def test_a_rule_that_anybody_sees_solves_four_fifths_and_random_play_a_quarter() -> None:
    size = clues.Size(2, 2)
    tasks = [clues.task(size, "eval", random.Random(number)) for number in range(2000)]
    solved = [task.share(by_rule(task.messages[-1]["content"])) == 1 for task in tasks]
    assert 0.76 < sum(solved) / len(tasks) < 0.83
    rng = random.Random(0)
    lucky = [task.share(" ".join(f"{name} in {rng.choice('AB')}" for name in task.questions)) == 1 for task in tasks]
    assert 0.22 < sum(lucky) / len(tasks) < 0.28


def test_the_novice_sees_no_puzzle_of_the_example_and_names_rooms_at_random() -> None:
    rng, rooms, readings = random.Random(0), Counter[str](), 0
    assert len(set(novice.WORDS)) == len(novice.WORDS) <= 150
    for _ in range(2000):
        messages = novice.conversation(rng).messages
        system, user, answer = (message["content"] for message in messages)
        names = re.findall(r"(\w+)\?", user)
        if system.startswith("Repeat"):
            readings += 1
            assert answer in user and answer.startswith(names[0])
            continue
        assert all(set(names) & set(clues.NAMES[split]) for split in ("train", "eval"))
        assert re.findall(r"(\w+) in [ABC]\.", answer) == names and len(answer.split()) == 3 * len(names)
        if system.startswith("Say in which room each was: A B."):
            assert system == clues.Task(clues.Size(2, 2), [], (), (), {}).messages[0]["content"]
            rooms.update(re.findall(r"in ([AB])\.", answer))
    assert 500 < readings < 700 and abs(rooms["A"] - rooms["B"]) < 120


def test_the_settings_for_a_gpu_are_settings() -> None:
    assert load(FOLDER / "gpu.toml", environment={}).model == "Qwen/Qwen2.5-3B-Instruct"


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 150
    assert foreign_imports(APP) == {"clues", "episodes"}
    assert foreign_imports(FOLDER / "clues.py") == {"make_puzzles"}


class Server(FakeOpenAI):
    """Plays by the rule; every fourth answer names no room."""

    wrong = True

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return super().answer(number, body)

    def say(self, number: int, board: str) -> str:
        return "I do not know." if self.wrong and number % 4 == 0 else by_rule(board)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.mark.slow
def test_attempts_at_a_puzzle_are_a_group_and_each_gets_its_share_of_letters(server: Server) -> None:
    server.wrong = False
    report = run(APP, server, "--questions", "32", "--attempts", "4")
    groups = {headers["x-trajectory-id"]: headers["x-group-id"] for headers in server.headers_seen}
    assert Counter(Counter(groups.values()).values()) == {4: 8} and report["failed_requests"] == 0
    tasks = [clues.task(clues.Size(2, 2), "train", random.Random(f"train 0 {number} ")) for number in range(8)]
    shares = [task.share(by_rule(task.messages[-1]["content"])) for task in tasks]
    rewards = {posted["trajectory_id"]: posted["reward"] for posted in server.feedback}
    by_group = {(int(groups[trajectory].rpartition("task")[2]), reward) for trajectory, reward in rewards.items()}
    assert by_group == set(enumerate(shares)) and len(rewards) == 32
    assert report["solved"] == 4 * shares.count(1)
    assert {body["max_tokens"] for body in server.bodies} == {12}


@pytest.mark.slow
def test_an_answer_without_letters_earns_nothing(server: Server) -> None:
    report = run(APP, server, "--questions", "40", "--attempts", "4")
    assert sum(posted["reward"] == 0 for posted in server.feedback) >= 10
    assert report["failed_requests"] == 0 and report["questions"] == 40


@pytest.mark.slow
def test_held_out_puzzles_are_marked_and_get_no_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "20", "--split", "eval", "--size", "full", "--max-tokens", "99")
    assert report["solved"] == 0 and len(report["each"]) == len(report["fields"]) == 20
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"} and server.feedback == []
    assert {body["max_tokens"] for body in server.bodies} == {99}


CHECK = """
import json, random, sys
import clues, make_puzzles

for text in sys.argv[1:]:
    size = clues.Size.of(text)
    prepared = clues.stored(size)
    made = make_puzzles.make_puzzles(size, 5, 0)
    assert json.dumps(made) == json.dumps(prepared[:5]), text
    for listed, answer in prepared[5:8]:
        assert make_puzzles.is_unique(size, listed, answer), listed
        for clue in listed:
            assert not make_puzzles.is_unique(size, [other for other in listed if other != clue], answer), clue
not_prepared = clues.task(clues.Size(2, 2, 2), "train", random.Random(0))
assert len(not_prepared.letters) == 3
"""


@pytest.mark.long(part="examples")
def test_or_tools_makes_the_same_puzzles_again_and_proves_each_unique_and_minimal() -> None:
    done = subprocess.run([PYTHON, "-c", CHECK, *PREPARED], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
