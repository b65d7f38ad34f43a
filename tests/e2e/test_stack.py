"""The whole stack, with nothing replaced: `whetstone up` and `whetstone demo` as a user starts them."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from proxy.dashboard.queries import policies
from proxy.dashboard.views import version_rewards
from whetstone.database.engine import connect
from whetstone.registry import reward_store

ROOT = Path(__file__).resolve().parents[2]
WHETSTONE = [sys.executable, "-m", "whetstone.cli.main"]
AGENT = [sys.executable, str(ROOT / "whetstone" / "demo" / "tictactoe" / "agent.py")]

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def started_by(pid: int) -> list[int]:
    """Process ids of `pid` and of all that descend from it."""
    pids = [pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                pids += started_by(int(child))
    return pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return value


def query(data: Path, sql: str) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(f"file:{data / 'whetstone.db'}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql)]


@contextlib.contextmanager
def reading(data: Path) -> Iterator[Connection]:
    engine = connect(f"sqlite:///{data / 'whetstone.db'}")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextlib.contextmanager
def up(data: Path, *arguments: str, **settings: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A stack that is ready, and its up.json; stopped at the end, every process gone. `settings` are for `up` alone."""
    command = [*WHETSTONE, "up", "--data", str(data), "--port", "0", *arguments]
    with data.with_suffix(".out").open("ab") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=out)
    try:
        until(lambda: process.poll() is not None or (data / "up.json").exists(), 240)
        assert process.poll() is None, "the stack did not come up"
        everything = started_by(process.pid)
        yield process, json.loads((data / "up.json").read_text())
        everything = list({*everything, *started_by(process.pid)})
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        until(lambda: not any(alive(pid) for pid in everything))
        assert not (data / "up.json").exists()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


def play(address: str, games: int, *arguments: str) -> dict[str, Any]:
    command = [*AGENT, "--base-url", f"{address}/v1", "--games", str(games), *arguments]
    report: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)
    return report


def assert_every_completion_is_exact(data: Path) -> None:
    rows = query(data, "SELECT * FROM admin_completions WHERE status = 'complete'")
    assert rows
    for row in rows:
        ids, logprobs = json.loads(row["token_ids"]), json.loads(row["inference_logprobs"])
        assert len(ids) == len(logprobs) == row["completion_tokens"] > 0
        assert all(-100 < logprob <= 0 for logprob in logprobs)
        assert row["policy_version"] >= 0
        assert json.loads(row["prompt_token_ids"])


def test_the_demo_shows_a_run_and_its_database_keeps_what_was_promised(tmp_path: Path) -> None:
    data = tmp_path / "demo"
    command = [*WHETSTONE, "demo", "--data", str(data), "--steps", "2", "--games", "30"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    # Two steps teach little: whether the intervals part is chance, that both codes are honest is not.
    assert ended.returncode == (0 if "the reward rose" in ended.stdout else 1), ended.stdout + ended.stderr
    assert ("the reward rose" in ended.stdout) != ("did not rise" in ended.stdout)
    assert " 0 failed requests" in ended.stdout
    assert "reward by version" in ended.stdout and "●" in ended.stdout, "the curve, as text"
    assert (data / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert query(data, "SELECT DISTINCT status FROM admin_completions") == [{"status": "complete"}]
    assert_every_completion_is_exact(data)
    steps = query(data, "SELECT * FROM admin_steps WHERE state = 'promoted' ORDER BY step")
    assert [step["version_out"] for step in steps[:2]] == [1, 2]
    for step in steps:
        assert step["mismatch_k3"] < 1e-3
        assert step["loss"] is not None and step["grad_norm"] > 0
    shares = query(data, "SELECT fresh_share FROM steps WHERE state = 'promoted'")
    assert all(share["fresh_share"] >= 0.3 for share in shares)
    trained = query(data, "SELECT * FROM admin_trajectories WHERE state = 'trained'")
    assert trained and all(row["split"] == "train" and row["why_not_trained"] is None for row in trained)
    assert {row["state"] for row in query(data, "SELECT state FROM admin_trajectories WHERE split = 'eval'")} == {
        "rewarded"
    }
    assert query(data, "SELECT DISTINCT state FROM admin_versions WHERE version = 0") == [{"state": "retired"}]
    used = query(data, "SELECT count(*) AS used FROM admin_feedback WHERE state = 'used'")
    assert used[0]["used"] == len(trained)
    assert_the_dashboard_counts_the_same_games(data, ended.stdout)


def assert_the_dashboard_counts_the_same_games(data: Path, printed: str) -> None:
    """The policy page's held-out figures are those of the demo's own table."""
    with reading(data) as connection:
        rewards = policies.rewards(connection, "default", "starter")
        last = max(one.version for one in rewards.held_out)
        before, after = (
            reward_store.held_out_rewards(connection, "default", "starter", version) for version in (0, last)
        )
    means = version_rewards.mean_rewards(rewards).held_out
    gain = version_rewards.gain(version_rewards.Comparison(last, is_held_out=True), rewards, before, after)
    for version in (0, last):
        mean = means[version]
        assert mean.rewarded == 30 and mean.low is not None and mean.high is not None
        assert f"{mean.mean:.1%}" in printed and f"{mean.low:.1%} to {mean.high:.1%}" in printed
    assert gain.pairs == 30 and f"{gain.difference.mean:+.1%}" in printed


@pytest.mark.long(part="stacks")
def test_without_a_tag_games_are_found_grouped_and_trained_on(tmp_path: Path) -> None:
    data = tmp_path / "untagged"
    command = [*WHETSTONE, "demo", "--untagged", "--data", str(data), "--steps", "2", "--games", "40"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False)
    assert "0 failed requests" in run.stdout, run.stdout + run.stderr
    formed = {row["formed_by"] for row in query(data, "SELECT DISTINCT formed_by FROM admin_groups")}
    assert formed <= {"prompt", "single"}
    trained = query(
        data,
        "SELECT t.trajectory_id, count(*) AS turns, sum(c.threaded_by = 'new') AS begun FROM admin_trajectories AS t"
        " JOIN admin_completions AS c USING (trajectory_id) WHERE t.state = 'trained' GROUP BY 1",
    )
    assert len(trained) > 100
    # Each begins once; what follows was found by what it says.
    assert {row["begun"] for row in trained} <= {0, 1}
    assert sum(row["turns"] for row in trained) > 2 * len(trained)
    (eval_,) = query(data, "SELECT count(*) AS n FROM admin_trajectories WHERE split = 'eval' AND trained_in_step > 0")
    assert eval_["n"] == 0


@pytest.mark.long(part="stacks")
def test_a_stack_whose_engine_dies_or_hangs_soon_has_it_back_with_the_live_version(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(data, "--train") as (_, address):
        assert "ERROR" not in (data / "logs" / "vllm.log").read_text()  # nor did the self-test cause one
        told = data.with_suffix(".out").read_text()
        assert "s: starting the engine" in told and "vLLM is ready after" in told and "self-test passed (" in told
        assert set(address) == {"proxy", "vllm", "replicas", "database", "broker", "policy", "served", "pids"}
        assert address["policy"] == "starter" and address["served"] == "starter@v0"
        assert play(address["proxy"], 128)["failed_requests"] == 0
        until(lambda: query(data, "SELECT live_version FROM admin_policies")[0]["live_version"] >= 1, 120)
        # The training worker may be in a long step: nobody waits for it.
        with paused(address["pids"]["trainer"]):
            live = query(data, "SELECT live_version FROM admin_policies")[0]["live_version"]
            until(lambda: spoken_by(address["proxy"]) == live)
            for harm in (signal.SIGKILL, signal.SIGSTOP):
                os.kill(engine_core(data), harm)
                assert_honest(until(lambda: while_away(address["proxy"])))
                assert until(lambda: spoken_by(address["proxy"]), 240) == live
    with up(data) as (_, address):
        assert spoken_by(address["proxy"]) == live
    assert_every_completion_is_exact(data)


def engine_core(data: Path) -> int:
    """Process id of vLLM's engine, which is not the server that up.json names."""
    server = json.loads((data / "up.json").read_text())["pids"]["vllm"]
    (pid,) = [pid for pid in started_by(server) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that does nothing for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def assert_honest(refused: httpx.Response) -> None:
    """What is answered while vLLM is away says so, and when to come back."""
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] in {"upstream_down", "adapter_loading"} and "try again" in error["message"]


def ask(address: str, model: str = "starter") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)


def spoken_by(address: str) -> int:
    """The version that answers now; 0 as well while nobody does."""
    answer = ask(address)
    return int(answer.headers["x-policy-version"]) if answer.status_code == 200 else 0


def while_away(address: str) -> httpx.Response | None:
    answer = ask(address)
    return answer if answer.status_code != 200 else None


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--port", "{taken}"], {}, ["is taken", "--port"]),
        (["--data", "/proc/nobody/writes/here"], {}, ["cannot be written", "--data"]),
        ([], {"WHETSTONE_TRAINER__LERNING_RATE": "1"}, ["did you mean 'trainer.learning_rate'"]),
        (["--model", "/nowhere/to/be/found"], {}, ["no model"]),
        ([], {"WHETSTONE_DATABASE": "postgresql+psycopg://nobody@127.0.0.1:1/x"}, ["no database answers"]),
    ],
)
def test_a_start_that_cannot_succeed_says_what_to_change(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], words: list[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = [argument.format(taken=taken.getsockname()[1]) for argument in arguments]
        command = [*WHETSTONE, "up", *([] if "--data" in given else ["--data", str(tmp_path)]), *given]
        command += [] if "--port" in given else ["--port", "0"]
        ended = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode == 2
    said = " ".join(ended.stderr.split())
    assert all(word in said for word in words), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [("WHETSTONE_PROXY__PORT", "(proxy.port: "), ("WHETSTONE_VLLM__PORT", "(vllm.port: ")],
)
def test_a_taken_port_is_told_before_anything_is_started_or_its_programs_are_loaded(
    tmp_path: Path, setting: str, words: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = os.environ | {"WHETSTONE_PROXY__PORT": "0", setting: str(port)}
        command = [sys.executable, "-X", "importtime", "-m", "whetstone.cli.main", "up", "--data", str(tmp_path)]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken {words}" in ended.stderr and "choose another with" in ended.stderr
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time")}
    assert "typer" in loaded and not {"alembic", "celery", "torch"} & loaded
    assert {path.name for path in tmp_path.iterdir()} <= {"up.lock"}


def test_a_second_stack_on_the_same_data_is_refused(tmp_path: Path) -> None:
    import fcntl

    with (tmp_path / "up.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()
        command = [*WHETSTONE, "up", "--data", str(tmp_path), "--port", "0"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "process 4711" in " ".join(ended.stderr.split())


def test_a_data_folder_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whetstone.config.settings import SettingsError, load
    from whetstone.stack import stack

    monkeypatch.setattr(stack, "MIN_FREE_BYTES", 2**60)
    with (
        pytest.raises(SettingsError, match="MiB left"),
        stack.running(load(environment={}, data=tmp_path), lambda _: None),
    ):
        pass
