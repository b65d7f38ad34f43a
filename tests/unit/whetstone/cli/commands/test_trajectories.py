"""`whetstone trajectories`, `groups`, `status`, `export`, `import`, `policies`: words, forms and exit codes."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks.fakes.json_server import Handler, Server
from migrations import schema
from tests.conftest import NOW, Seed
from tests.unit.whetstone.conftest import Ended
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.commands.status import examine
from whetstone.cli.lazy import loaded
from whetstone.cli.main import app
from whetstone.cli.tables.status.view import shown as status_shown
from whetstone.cli.tables.trajectory_tables import trajectory_shown
from whetstone.config.settings import Settings
from whetstone.database.engine import connect


class Here:
    """A data folder without a stack."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.engine = connect(f"sqlite:///{data / 'whetstone.db'}")
        self.seed = Seed(self.engine)
        self.seed.project("default")

    def run(self, *arguments: str, columns: int = 80, terminal: bool = False) -> Result:
        runner = CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1", "TTY_COMPATIBLE": str(int(terminal))})
        return runner.invoke(app, [*arguments, "--data", str(self.data)])

    def told(self, *arguments: str) -> Any:
        """What it says as JSON."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def here(sqlite_template: Path, tmp_path: Path) -> Iterator[Here]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    here = Here(tmp_path)
    yield here
    here.engine.dispose()


def filled(here: Here) -> None:
    here.seed.group("g", size=2, rewarded=2, reward_mean=0.5, reward_spread=0.5, state="scored")
    here.seed.trajectory("good", "g", turns=2, reward=1.0, task="x", state="rewarded", metadata={"a": 1})
    here.seed.trajectory("bad", "g", reward=0.0, why_not_trained="waiting_step", created_at=NOW + timedelta(minutes=1))
    here.seed.trajectory("alone", split="eval", why_not_trained="split_eval", created_at=NOW - timedelta(days=1))


def test_the_newest_come_first_and_fit_a_screen_of_80_columns(here: Here) -> None:
    filled(here)
    result = here.run("trajectories", terminal=True)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["bad", "good", "alone"]
    assert max(map(len, lines)) <= 80
    assert [row["trajectory_id"] for row in here.told("trajectories", "--limit", "2")] == ["bad", "good"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("--task", "x"), ["good"]),
        (("--group", "g"), ["bad", "good"]),
        (("--state", "rewarded"), ["good"]),
        (("--split", "eval"), ["alone"]),
        (("--why", "waiting_step"), ["bad"]),
        (("--min-reward", "0.5"), ["good"]),
        (("--max-reward", "0"), ["bad"]),
        (("--version", "1"), []),
        (("--policy", "starter", "--group", "g", "--min-reward", "0"), ["bad", "good"]),
        (("--since", "1h"), []),
    ],
    ids=str,
)
def test_filters_go_together(here: Here, arguments: tuple[str, ...], found: list[str]) -> None:
    filled(here)
    assert [row["trajectory_id"] for row in here.told("trajectories", *arguments)] == found


def test_one_trajectory_is_shown_as_the_conversation_it_was(here: Here) -> None:
    filled(here)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    here.seed.completion("good", 2, response={"role": "assistant", "tool_calls": [call]})
    here.seed.feedback("good", 1.0, comment="[bold]fine", trajectory_id="good", state="applied")
    shown = here.run("trajectories", "good").stdout
    assert [word in shown for word in ("question 0", "answer 1", "→ look({})", "[bold]fine")] == [True] * 4
    told = here.told("trajectories", "good")
    assert (told["trajectory_id"], told["metadata"], len(told["turns"])) == ("good", {"a": 1}, 3)
    assert "token_ids" not in told["turns"][0]
    assert [len(one["messages"]) for one in told["conversations"]] == [6]
    assert here.told("trajectories", "good", "--ids")["turns"][0]["token_ids"] == [3, 4]


def test_what_apps_said_does_not_move_the_readers_cursor() -> None:
    feedback = {"source": "reward", "reward": 1.0, "comment": "a\x1b[1Ab", "state": "used"}
    told = {"trajectory_id": "t", "task": "\x1b]52;c;eA==\x07", "turns": [], "feedback": [feedback]}
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    console.print(trajectory_shown(told))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "·]52;c;eA==·" in shown and "a·[1Ab" in shown
    assert not any(character in shown for character in "\x1b\x07")


def test_a_group_is_shown_with_its_members(here: Here) -> None:
    filled(here)
    shown = here.run("groups", "g").stdout
    assert "reward_mean" in shown and "good" in shown and "bad" in shown
    told = here.told("groups", "g")
    assert (told["group_id"], [one["trajectory_id"] for one in told["members"]]) == ("g", ["good", "bad"])
    assert [row["group_id"] for row in here.told("groups", "--state", "scored")] == ["g"]
    assert here.told("groups", "--state", "discarded") == []


@pytest.mark.parametrize(("command", "named"), [("trajectories", "goo"), ("groups", "")])
def test_what_is_not_there_is_told_with_what_is_alike(here: Here, command: str, named: str) -> None:
    filled(here)
    result = here.run(command, named or "h")
    assert result.exit_code == 1
    assert "there is no" in result.stderr
    assert ("there are: good" in result.stderr) == (command == "trajectories")


def test_without_a_database_each_says_what_to_do(whetstone: Callable[..., Ended], tmp_path: Path) -> None:
    for command in (["trajectories"], ["groups"], ["status"], ["export", "sft", "--to", str(tmp_path / "a.jsonl")]):
        result = whetstone(*command, "--data", str(tmp_path / "none"))
        assert (result.code, result.out) == (2, "")
        assert "start the stack with `whetstone up` first" in result.err
    assert not (tmp_path / "none").exists()


def test_status_says_what_is_wrong_and_what_to_do(here: Here) -> None:
    filled(here)
    step = {"policy": "starter", "version_in": 0, "groups": 1, "trajectories": 2, "config": {}, "attempt": 1}
    here.seed.insert(schema.steps, project="default", id="starter#1", number=1, state="failed", error="no numbers",
                     created_at=NOW, **step)  # fmt: skip
    result = here.run("status", "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["running"] is False
    (policy,) = told["policies"]
    assert policy["groups"] == {"open": 0, "closed": 0, "scored": 1, "claimed": 0}
    assert (policy["last_step"]["step"], policy["last_step"]["state"]) == (1, "failed")
    said = {problem["what"] for problem in told["problems"]}
    assert {f"no stack runs on {here.data}", "step 1 of starter was failed: no numbers"} <= said
    shown = here.run("status").stdout
    assert "✗ no stack runs" in shown.replace("\n", " ")


def test_a_dead_process_and_a_silent_proxy_are_found(here: Here) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write_addresses(here.data, proxy="http://127.0.0.1:9", pids={"up": os.getpid(), "judge": gone.pid})
    here.seed.feedback("t", 1.0)
    facts = examine(Settings(data=here.data), datetime.now(UTC))
    assert [(one["name"], one["alive"]) for one in facts["processes"]] == [("up", True), ("judge", False)]
    said = " ".join(problem["what"] for problem in facts["problems"])
    assert f"judge (process {gone.pid}) is dead" in said
    assert "the proxy does not answer at http://127.0.0.1:9" in said
    assert "feedback wait for the judging worker" in said


class Proxy(Server):
    """Answers as a proxy that is ready; what it measures can be set."""

    def __init__(self) -> None:
        super().__init__(_ProxyHandler)
        self.ready: dict[str, Any] = {"status": "ok", "vllm": True, "database": True, "database_away_since": None}
        self.ready |= {"unwritten": 0, "journal_bytes": 0, "dropped": 0}
        self.figures = {"whetstone_capture_completeness": 1.0, "whetstone_data_free_bytes": 5e10}
        self.figures |= {"whetstone_unwritten_calls": 0.0}


class _ProxyHandler(Handler):
    server: Proxy

    def respond(self, body: dict[str, Any]) -> None:
        if self.path == "/readyz":
            self.whole(200, self.server.ready)
        else:
            text = "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in self.server.figures.items())
            self.whole(200, text.encode(), "text/plain")


@pytest.fixture
def proxy(here: Here) -> Iterator[Proxy]:
    """That of a stack on the folder."""
    with Proxy() as proxy:
        write_addresses(here.data, proxy=proxy.url, pids={"up": os.getpid()})
        yield proxy


def status_of(here: Here) -> tuple[dict[str, str], str]:
    """Its problems with their remedies, and what it shows."""
    now = datetime.now(UTC)
    facts = examine(Settings(data=here.data), now)
    console = Console(file=io.StringIO(), width=200)
    console.print(status_shown(facts, now))
    return {one["what"]: one["do"] for one in facts["problems"]}, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_stack_without_a_problem_is_shown_as_that(here: Here, proxy: Proxy) -> None:
    problems, shown = status_of(here)
    assert problems == {} and "nothing is wrong" in shown and "46.6 GiB free" in shown


def test_a_full_disk_is_two_problems_and_no_question_of_completeness(here: Here, proxy: Proxy) -> None:
    proxy.ready |= {"database": False, "database_away_since": "2026-01-01T12:00:00Z", "unwritten": 31}
    proxy.figures |= {"whetstone_capture_completeness": 0.4, "whetstone_unwritten_calls": 31.0}
    proxy.figures["whetstone_data_free_bytes"] = 8 * 2**20
    problems, shown = status_of(here)
    (away, remedy), (few, free_some) = problems.items()
    assert away.startswith("database away: ") and "2026-01-01T12:00:00Z; 31 records wait in the journal" in away
    assert remedy.startswith("free disk space")
    assert few.startswith("few free bytes: 8 MiB") and "privacy.keep_days" in free_some
    assert "ready, database away" in shown and "8 MiB free" in shown and "past the proxy" not in shown


def test_few_free_bytes_are_a_problem_before_the_disk_is_full(here: Here, proxy: Proxy) -> None:
    proxy.figures["whetstone_data_free_bytes"] = 8 * 2**20
    problems, shown = status_of(here)
    assert [what.split(":")[0] for what in problems] == ["few free bytes"]
    assert "nothing is wrong" not in shown


def test_a_journal_that_takes_no_more_is_a_problem(here: Here, proxy: Proxy) -> None:
    proxy.ready["journal_full"] = True
    ((what, remedy),) = status_of(here)[0].items()
    assert what == "journal full: it takes no more records, and the proxy refuses requests (503)"
    assert "make room on the disk" in remedy


@pytest.mark.parametrize(
    ("jump_s", "what"),
    [
        (3600.4, "clock jumped: ahead by 1:00:00 since the proxy started"),
        (-90.0, "clock jumped: back by 0:01:30 since the proxy started"),
        (-59.0, None),
    ],
)
def test_a_clock_that_jumped_is_a_problem(here: Here, proxy: Proxy, jump_s: float, what: str | None) -> None:
    proxy.figures["whetstone_clock_jump_seconds"] = jump_s
    assert list(status_of(here)[0]) == [what] * (what is not None)


def test_tokens_are_missing_only_once_nothing_waits_to_be_written(here: Here, proxy: Proxy) -> None:
    proxy.figures |= {"whetstone_capture_completeness": 0.4, "whetstone_unwritten_calls": 3.0}
    assert status_of(here)[0] == {}
    proxy.figures["whetstone_unwritten_calls"] = 0.0
    (what,) = status_of(here)[0]
    assert what == "60.0% of the tokens that vLLM sampled are not recorded"


def test_calls_that_nobody_recorded_are_told_of_a_proxy_that_is_ready(here: Here, proxy: Proxy) -> None:
    proxy.ready["dropped"] = 7
    assert "7 calls were answered and not recorded" in status_of(here)[0]


def test_a_writer_that_has_ended_is_not_blamed_on_vllm(here: Here, proxy: Proxy) -> None:
    proxy.ready["writer"] = False
    (what,) = status_of(here)[0]
    assert what == "the proxy is not ready: the thread that writes to the database has ended"


def test_a_task_of_the_proxy_that_fails_is_told(here: Here, proxy: Proxy) -> None:
    proxy.ready["failing"] = {"watch": "OperationalError: gone"}
    assert "the proxy's task 'watch' fails: OperationalError: gone" in status_of(here)[0]


def test_export_and_import_tell_what_came_of_it(here: Here, tmp_path: Path) -> None:
    filled(here)
    to = tmp_path / "all.jsonl"
    told = here.told("export", "trajectories", "--to", str(to))
    assert (told["rows"], told["left_out"], told["bytes"]) == (2, {"eval": 1}, to.stat().st_size)
    told = here.told("import", str(to), "--policy", "elsewhere", "--dry-run")
    assert (told["conversations"], told["trajectories"], told["dry_run"]) == (2, 0, True)
    told = here.told("import", str(to), "--policy", "elsewhere")
    assert (told["trajectories"], told["taken"]) == (0, 2)  # they are there, as an app made them


def test_an_export_of_nothing_leaves_no_file_and_exit_code_1(here: Here, tmp_path: Path) -> None:
    result = here.run("export", "sft", "--to", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 1
    assert "nothing to write" in result.stdout
    assert not list(tmp_path.glob("*out*"))


def test_an_export_to_stdout_has_rows_alone_there(whetstone: Callable[..., Ended], here: Here) -> None:
    filled(here)
    ended = whetstone("export", "trajectories", "--to", "-", "--data", str(here.data))
    assert [json.loads(line)["trajectory_id"] for line in ended.out.splitlines()] == ["good", "bad"]
    assert "2 rows" in ended.err and "left out: 1 eval" in ended.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("export", "sft", "--to", "x.csv"), ".jsonl or .parquet"),
        (("export", "sft", "--ids", "--to", "x.jsonl"), "--ids goes with trajectories"),
        (("export", "sft", "--where", "rewrd > 1", "--to", "x.jsonl"), "rewrd"),
        (("import", "nothing.jsonl"), "cannot be read"),
        (("import", "nothing.jsonl", "--policy", "starter"), "answers apps"),
        (("trajectories", "--since", "soon"), "30min, 12h"),
        (("groups", "--state", "odd"), "odd"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_told_without_a_traceback(
    whetstone: Callable[..., Ended], here: Here, arguments: tuple[str, ...], why: str
) -> None:
    result = whetstone(*arguments, "--data", str(here.data))
    assert (result.code, result.out) == (2, "")
    assert why in " ".join(result.err.replace("│", " ").split())


def test_the_shell_is_told_the_names_of_policies(here: Here) -> None:
    here.seed.insert(
        schema.policies, project="default", id="stranger", base_model="b", model_path="m", live_version=0,
        next_version=1, next_step=1, state="recording", created_at=NOW, upstream="elsewhere",
    )  # fmt: skip
    asked = {"_WHETSTONE_COMPLETE": "complete_bash", "COMP_CWORD": "3", "COMP_WORDS": "whetstone versions rollback st"}
    program = Path(sys.executable).with_name("whetstone")
    environment = {**os.environ, **asked, "WHETSTONE_DATA": str(here.data)}
    result = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["starter", "stranger"]


def test_the_shell_completes_the_commands_of_a_group_that_alone_lists() -> None:
    words = {"_WHETSTONE_COMPLETE": "complete_bash", "COMP_CWORD": "2", "COMP_WORDS": "whetstone keys c"}
    program = Path(sys.executable).with_name("whetstone")
    result = subprocess.run([program], env={**os.environ, **words}, capture_output=True, text=True)
    assert result.stdout.split() == ["create"]


def test_policies_are_told_as_json(here: Here) -> None:
    (row,) = here.told("policies", "list")
    assert (row["policy"], row["live_version"], row["state"]) == ("starter", 0, "training")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("policies", "list"), "policy base model answered by live candidate state training"),
        (("keys", "list"), "key name opens state inference, feedback open"),
        (("versions",), "version from state reason k3 held out loaded when live"),
        (("trajectories",), "trajectory version state reward why not trained began rewarded waiting_step"),
        (("groups",), "group formed by state rewarded mean spread reason began scored"),
        (("groups", "g"), "trajectory version state reward why not trained began"),
        (("status",), "policy state versions last step groups 1 scored training"),
        (("doctor", "--log", "--verbose"), "question answer result, and what it means rewards differ within groups"),
        (("sql",), "view what it is for"),
        (("sql", "admin_steps"), "column on SQLite on PostgreSQL meaning"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_no_table_cuts_a_header_or_a_state_at_80_columns(here: Here, command: tuple[str, ...], words: str) -> None:
    filled(here)
    here.seed.trajectory("one-id-of-forty-characters-" + "x" * 13, why_not_trained="waiting_for_more_siblings")
    for name in ("first", "second"):
        made = {"created_at": NOW, "requests_per_min": 60, "tokens_per_min": 1_000_000}
        here.seed.insert(schema.api_keys, project="default", id=f"key-{name}", name=f"the {name} app's own key",
                         secret_sha256=name, scopes=["inference", "feedback"], **made)  # fmt: skip
    shown = here.run(*command, terminal=True).stdout
    assert shown and re.findall(r"\S*…\S*", shown.replace('"SELECT …"', "")) in ([], ["one-id-…xxxxxxxx"])
    assert max(map(len, shown.splitlines())) <= 80
    assert {word for word in words.split() if word not in re.split(r"[\s│┃]+", shown)} == set()


def test_every_command_teaches_by_an_example() -> None:
    from typer.main import get_command

    def missing(command: Any, path: str) -> list[str]:
        if hasattr(command, "commands"):
            return [name for key, one in command.commands.items() for name in missing(loaded(one), f"{path} {key}")]
        shown = path.replace("versions list", "versions")
        return [] if f"    {shown}" in command.help or f"({shown}" in command.help else [path]

    assert missing(get_command(app), "whetstone") == []
