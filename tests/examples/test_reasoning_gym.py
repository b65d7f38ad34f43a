"""The app of examples/reasoning_gym: with a small stand-in for the package, and in the long tests with the package."""

import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.examples.conftest import FakeOpenAI, foreign_imports, run
from whetstone.config.settings import load

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-examples" / "bin" / "python"
APP = ROOT / "examples" / "reasoning_gym" / "app.py"

STAND_IN = """
class Dataset(list):
    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.25 if entry["answer"] in answer else 0.0


def create_dataset(name, seed, size, **config):
    assert size == 1
    return Dataset([{"question": f"{name} {config} {seed}", "answer": str(seed)}])
"""


class Server(FakeOpenAI):
    """Answers with the last number of a question, or with the value of a sum, in one of four forms."""

    forms = ("{}", "Let me see. <answer>{}</answer>", "It is {}.", "I do not know.")

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.systems: set[str] = set()
        super().__init__()

    def answer(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        self.systems.add(body["messages"][0]["content"])
        return super().answer(number, body)

    def say(self, number: int, board: str) -> str:
        self.questions.append(board)
        if terms := re.search(r"(\d+) ([+-]) (\d+) =", board):
            right = int(terms[1]) + (1 if terms[2] == "+" else -1) * int(terms[3])
        else:
            right = int(board.split()[-1])
        return self.forms[number % len(self.forms)].format(right)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_the_settings_for_a_gpu_are_settings() -> None:
    assert load(APP.parent / "gpu.toml", environment={}).model == "Qwen/Qwen2.5-3B-Instruct"


def test_the_app_is_short_and_imports_nothing_of_ours() -> None:
    assert len(APP.read_text().splitlines()) <= 60
    assert foreign_imports(APP) == {"reasoning_gym", "episodes"}


def seeds(questions: list[str]) -> set[int]:
    return {int(question.split()[-1]) for question in questions}


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_the_score_of_the_task_is_the_reward_and_only_a_right_answer_is_solved(server: Server) -> None:
    report = run(APP, server, "--questions", "32", "--attempts", "8", "--config", '{"max_animals": 2}')
    rewards = Counter(posted["reward"] for posted in server.feedback)
    assert rewards == {1.0: 16, 0.25: 8, 0.0: 8}
    assert (report["solved"], report["questions"], report["failed_requests"]) == (16, 32, 0)
    assert len(set(server.questions)) == 4 and all(seed % 2 for seed in seeds(server.questions))
    assert all(question.startswith("leg_counting {'max_animals': 2} ") for question in server.questions)
    assert seeds(server.questions) == {random.Random(f"train 0 {k} ").randrange(2**30) * 2 + 1 for k in range(4)}


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_held_out_questions_have_even_seeds_and_no_reward(server: Server) -> None:
    report = run(APP, server, "--questions", "20", "--split", "eval", "--plain", "--dataset", "any")
    assert len(report["each"]) == 20 == len(seeds(server.questions)) and server.feedback == []
    assert not any(seed % 2 for seed in seeds(server.questions))
    assert {headers["x-split"] for headers in server.headers_seen} == {"eval"}
    assert server.systems == {"Give the answer alone."}


@pytest.mark.long(part="examples")
def test_the_package_makes_the_questions_and_scores_the_answers(server: Server) -> None:
    config = json.dumps({"min_terms": 2, "max_terms": 2, "max_digits": 2})
    flags = ("--dataset", "chain_sum", "--config", config, "--questions", "32", "--attempts", "8")
    command = [PYTHON, APP, "--base-url", f"{server.url}/v1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["solved"], report["questions"], report["failed_requests"]) == (16, 32, 0)
    assert len(set(server.questions)) == 4
    rewards = [posted["reward"] for posted in server.feedback]
    assert rewards.count(1.0) == 16 and max(reward for reward in rewards if reward < 1) < 0.5


@pytest.mark.long(part="examples")
@pytest.mark.parametrize("name", ["leg_counting", "spell_backward", "word_sorting", "family_relationships", "maze"])
def test_a_task_is_the_same_for_the_same_seed_and_its_own_answer_is_right(name: str) -> None:
    check = (
        "import reasoning_gym, sys\n"
        "first, again, other = (reasoning_gym.create_dataset(sys.argv[1], seed=s, size=1) for s in (7, 7, 8))\n"
        "assert first[0] == again[0] and first[0]['question'] != other[0]['question']\n"
        "assert first.score_answer(first[0]['answer'], first[0]) == 1\n"
    )
    done = subprocess.run([PYTHON, "-c", check, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
