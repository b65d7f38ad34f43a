"""`whetstone init`: what it asks, what it refuses, and the settings that come out of its file."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from whetstone.cli.main import app
from whetstone.config.settings import STARTER, Settings, load

PATH = "whetstone.toml"


def init(*options: str, answers: str | None = None) -> Result:
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    return runner.invoke(app, ["init", *options], input=answers)


def written(*options: str, answers: str | None = None) -> Settings:
    """Run it, and read its file as every program does."""
    result = init(*options, answers=answers)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return load(Path(PATH), environment={})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no variable of Whetstone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WHETSTONE_CONFIG", raising=False)
    return tmp_path


def refused(*options: str, answers: str | None = None) -> str:
    """Return the message of a refusal, after which there is no file."""
    result = init(*options, answers=answers)
    assert result.exit_code != 0
    assert not [*Path().iterdir()]
    return str(result.exception) if not isinstance(result.exception, SystemExit) else result.output


def test_enter_to_all_five_questions_is_the_defaults() -> None:
    settings = written(answers="\n\n\n\n\n")
    assert settings == Settings(learning={"starter": {"baseline": True}})
    assert settings.model == str(STARTER)


def test_yes_asks_nothing() -> None:
    result = init("--yes")
    assert result.exit_code == 0
    assert result.stdout.startswith("whetstone.toml is written") and "whetstone up" in result.stdout
    assert load(Path(PATH), environment={}).policy == "starter"


def test_the_questions_and_the_options_lead_to_the_same_file() -> None:
    answers = ("Qwen/Qwen2.5-7B-Instruct", "http://10.0.0.5:8001, http://10.0.0.6:8001", "support", "feedback")
    database = "postgresql+psycopg://me@db/log"
    init(answers="\n".join([*answers, database, ""]))
    by_questions = Path(PATH).read_text()
    model, vllm, policy, rewards = answers
    options = ("--model", model, "--vllm", vllm, "--policy", policy, "--rewards", rewards, "--database", database)
    settings = written("--force", *options)
    assert Path(PATH).read_text() == by_questions
    assert (settings.model, settings.policy, settings.database) == (model, policy, database)
    assert settings.vllm.urls == ("http://10.0.0.5:8001", "http://10.0.0.6:8001")


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model", "Qwen/Qwen2.5-7B-Instruct", "--rewards", "code", "--function", "tasks.checks:score"),
        ("--rewards", "code", "--function", "./reward.sh"),
        ("--rewards", "judge", "--judge", "openai/gpt-4.1-2025-04-14", "--policy", "a.b"),
        ("--vllm", "http://127.0.0.1:8001", "--database", "postgresql+psycopg://me:secret@db/log"),
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_each_line_of_the_file_has_a_comment_above_it(options: tuple[str, ...]) -> None:
    written("--yes", *options)
    lines = Path(PATH).read_text().splitlines()
    assert max(map(len, lines)) <= 120
    for number, line in enumerate(lines):
        if re.match(r"(# )?[\w\"]+ = ", line):  # a setting, or an example of one
            assert lines[number - 1].startswith("# "), line
            assert re.search(r"[.!):`]$", lines[number - 1]), "the end of a sentence"


def test_code_that_rewards_is_named() -> None:
    settings = written("--yes", "--rewards", "code", "--function", "tasks.checks:score")
    (function,) = settings.learning_of("starter").rewards
    assert (function.name, function.run, function.kind) == ("score", "tasks.checks:score", "reward")
    assert written("--yes", "--force", "--rewards", "code", "--function", "./my reward.sh").learning_of(
        "starter"
    ).rewards[0].name == "my_reward"  # fmt: skip


def test_a_judge_ranks_every_group() -> None:
    settings = written(answers="Qwen/Qwen2.5-7B-Instruct\n\n\njudge\nbase\n\n")
    assert settings.policy == "qwen2.5-7b-instruct"
    ruler = settings.learning_of(settings.policy).ruler
    assert (ruler.judges, ruler.rank, settings.judges["main"].model) == (("main",), "all", "base")


def test_a_wrong_answer_is_explained_and_the_question_comes_again() -> None:
    result = init(answers="nonsense\n\n\nNo Name\nsupport\n\n\n")
    assert result.exit_code == 0, result.output
    assert "'nonsense' is no folder here" in result.output and "no policy name" in result.output
    assert load(Path(PATH), environment={}).policy == "support"


def test_without_answers_nothing_is_written() -> None:
    assert "--yes takes the defaults" in refused(answers="")
    assert "--yes takes the defaults" in refused(answers="\n\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "./gone"), "is no folder here"),
        (("--model", "smollm2-135m"), "`whetstone models get smollm2-135m`"),
        (("--vllm", "127.0.0.1:8001"), "no address of a server, such as http://127.0.0.1:8001"),
        (("--vllm", "http://127.0.0.1:8001/v1"), "leave out /v1"),
        (("--vllm", "http://me:secret@127.0.0.1:8001"), "no name and no password"),
        (("--policy", "Support"), "no policy name"),
        (("--rewards", "people"), "feedback, code or judge"),
        (("--rewards", "code", "--function", "score"), "package.module:function"),
        (("--rewards", "judge"), "the starter is too small to judge"),
        (("--rewards", "judge", "--judge", "gpt-4"), "provider/model"),
        (("--judge", "base"), "--judge goes with --rewards judge"),
        (("--function", "a:b"), "--function goes with --rewards code"),
        (("--database", "postgres://me:secret@db/log"), "postgresql+psycopg://me:***@db/log"),
        (("--database", "mysql://db/log"), "no URL of a database"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(options: tuple[str, ...], words: str) -> None:
    message = refused("--yes", *options)
    assert words in message and "secret" not in message


def test_a_file_that_is_there_stays_and_no_question_comes() -> None:
    Path(PATH).write_text("mine")
    result = init(answers="\n\n\n\n\n")
    assert "--force replaces it" in str(result.exception) and "Base model" not in result.output
    assert Path(PATH).read_text() == "mine"
    assert written("--yes", "--force").policy == "starter"


def test_another_name_and_another_data_folder() -> None:
    result = init("--yes", "--config", "other.toml", "--data", "elsewhere")
    assert "whetstone up --config other.toml" in result.stdout
    assert load(Path("other.toml"), environment={}).data == Path("elsewhere")
    assert not Path(PATH).exists()


def test_a_password_is_its_owners_alone_and_the_file_says_so() -> None:
    written("--yes", "--database", "postgresql+psycopg://me:secret@db/log")
    assert Path(PATH).stat().st_mode & 0o077 == 0
    assert "out of version control" in Path(PATH).read_text()
