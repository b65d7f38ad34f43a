"""Real processes that misbehave: each costs its own trajectory an answer, and nobody else anything."""

import json
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from judge.reward_functions.sandbox import NoReward, NotFound, Sandbox
from whetstone.config.rewards import RewardFunction

FUNCTIONS = """
import os, socket, sys, time

def length(trajectory): return len(trajectory["messages"])
def named(trajectory): return {"a": 1, "b": True}
def noisy(trajectory):
    print("x" * 100_000); sys.stderr.write("y" * 100_000); os.write(1, b"3\\n"); os.system("echo 4")
    return 2
def sleeps(trajectory): time.sleep(60)
def spins(trajectory):
    while True: pass
def eats(trajectory):
    kept = []
    while True: kept.append(bytearray(10_000_000))
def raises(trajectory): raise KeyError("no such board\\nand more")
def exits(trajectory): sys.exit(3)
def dies(trajectory): os._exit(7)
def returns_a_set(trajectory): return {1}
def floods(trajectory): return "x" * 2_000_000
def forks_a_sleeper(trajectory):
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid
def forks_and_both_return(trajectory):
    os.fork()
    return trajectory["n"]
def escapes(trajectory):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        while True: pass
    while os.getsid(pid) != pid: time.sleep(0.01)
    return pid
def tells_and_sleeps(trajectory):
    with open(trajectory["path"], "w") as file: file.write(str(os.getpid()))
    time.sleep(600)
def where(trajectory): return {os.getcwd(): 1}
def writes(trajectory):
    with open("big", "wb") as file:
        for _ in range(100): file.write(bytes(2**20))
def told(trajectory): return {name: len(value) for name, value in os.environ.items()}
def folder(trajectory): return len(os.listdir())
def core(trajectory):
    import resource
    return resource.getrlimit(resource.RLIMIT_CORE)[0]
def child_of_the_wire(trajectory):
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd < 3: continue
        try: os.write(fd, b"[1]\\n")
        except OSError: pass
    return 1
def decimal(trajectory):
    from decimal import Decimal
    return Decimal("0.5")
now_and_then = [0]
def dies_every_second_time(trajectory):
    now_and_then[0] += 1
    if now_and_then[0] == 2: os._exit(1)
    return now_and_then[0]
not_callable = 3
"""

TRAJECTORY = json.dumps({"messages": [{"role": "user", "content": "hé\n"}], "n": 1}).encode()


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with functions, where the worker was started."""
    (tmp_path / "functions.py").write_text(FUNCTIONS, encoding="utf-8")
    (tmp_path / "raises_at_once.py").write_text("raise RuntimeError('not today')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sandbox(run: str, timeout_s: float = 10, memory_mb: int = 512) -> closing[Sandbox]:
    return closing(Sandbox(RewardFunction(name="f", run=run, timeout_s=timeout_s, memory_mb=memory_mb)))


def program(folder: Path, text: str) -> str:
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return "./program"


def answer(run: str, **limits: float) -> object:
    with sandbox(run, **limits) as box:
        return json.loads(box.ask(TRAJECTORY))


def why_not(run: str, **limits: float) -> str:
    with sandbox(run, **limits) as box, pytest.raises(NoReward) as error:
        box.ask(TRAJECTORY)
    return str(error.value)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_over(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_a_function_is_given_the_trajectory_and_its_answer_comes_back() -> None:
    assert answer("functions:length") == 1
    assert answer("functions:named") == {"a": 1, "b": True}
    assert answer("functions:decimal") == 0.5


def test_one_process_answers_for_many_trajectories() -> None:
    with sandbox("functions:forks_a_sleeper") as box:
        pids = [json.loads(box.ask(TRAJECTORY)) for _ in range(3)]
        parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids}
    assert len(set(pids)) == 3
    assert len(parents) == 1


def test_what_a_function_prints_is_not_its_answer() -> None:
    assert answer("functions:noisy") == 2


@pytest.mark.parametrize("name", ["sleeps", "spins"])
def test_a_function_that_takes_too_long_is_stopped(name: str) -> None:
    began = time.monotonic()
    assert why_not(f"functions:{name}", timeout_s=0.5) == "it took longer than 0.5 s"
    assert time.monotonic() - began < 10


def test_a_function_that_eats_memory_is_stopped_and_the_next_trajectory_is_answered() -> None:
    assert why_not("functions:eats", memory_mb=128) == "MemoryError"
    assert answer("functions:length", memory_mb=128) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "KeyError: 'no such board\\nand more'"),
        ("exits", "SystemExit: 3"),
        ("dies", "it ended with code 7"),
        ("returns_a_set", "TypeError: float() argument must be a string or a real number, not 'set'"),
        ("floods", "answered more than 1048576 bytes"),
        ("writes", "OSError: [Errno 27] File too large"),
        ("child_of_the_wire", "it wrote into the socket that its answers go through"),
    ],
)
def test_a_function_that_breaks_says_how(name: str, why: str) -> None:
    assert why_not(f"functions:{name}") == why


def test_a_process_that_died_is_replaced() -> None:
    with sandbox("functions:dies_every_second_time") as box:
        assert json.loads(box.ask(TRAJECTORY)) == 1
        with pytest.raises(NoReward, match="ended with code 1"):
            box.ask(TRAJECTORY)
        assert json.loads(box.ask(TRAJECTORY)) == 1


def test_what_a_function_leaves_running_ends_with_the_batch() -> None:
    with sandbox("functions:forks_a_sleeper") as box:
        pid = json.loads(box.ask(TRAJECTORY))
        assert is_running(pid)
    assert wait_until_over(pid, 60)


def test_what_leaves_the_process_group_runs_out_of_processor_time() -> None:
    with sandbox("functions:escapes", timeout_s=1) as box:
        pid = json.loads(box.ask(TRAJECTORY))
    assert is_running(pid)
    assert wait_until_over(pid, 30)


def test_a_function_that_forks_and_returns_twice_answers_once() -> None:
    with sandbox("functions:forks_and_both_return") as box:
        numbers = [json.loads(box.ask(json.dumps({"n": n}).encode())) for n in range(20)]
    assert numbers == list(range(20))


def test_settings_and_keys_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHETSTONE_DATABASE", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "secret")
    told = answer("functions:told")
    assert isinstance(told, dict)
    assert {"PATH", "PYTHONPATH", "TMPDIR"} <= told.keys()
    assert not {name for name in told if "WHETSTONE" in name or "KEY" in name}


def test_it_runs_in_an_empty_folder_that_is_deleted(functions: Path) -> None:
    assert answer("functions:folder") == 0
    assert answer(program(functions, "ls | wc -l")) == 0
    assert answer("functions:core") == 0
    with sandbox("functions:where") as box:
        (folder,) = json.loads(box.ask(TRAJECTORY))
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        ("nowhere:function", "No module named 'nowhere'"),
        ("functions:nothing", "has no attribute 'nothing'"),
        ("functions:not_callable", "cannot be called"),
        ("raises_at_once:function", "RuntimeError: not today"),
        ("./functions.py", "there is no program .*functions.py that may be executed"),
        ("./nothing", "there is no program .*nothing that may be executed"),
    ],
)
def test_a_function_that_is_not_there_is_looked_for_once(run: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with sandbox(run) as box:
        with pytest.raises(NotFound, match=why):
            box.start()
        monkeypatch.chdir("/")
        with pytest.raises(NotFound, match=why):
            box.ask(TRAJECTORY)


def test_a_program_reads_the_trajectory_and_prints_its_answer(functions: Path) -> None:
    assert answer(program(functions, "wc -c")) == len(TRAJECTORY) + 1
    assert answer(program(functions, """echo '{"a": 1}'""")) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo begin >&2; echo 'no board' >&2; exit 4", "ended with code 4: no board"),
        ("kill -9 $$", "was killed (Killed)"),
        ("head -c 2000000 /dev/zero", "answered more than 1048576 bytes"),
        ("head -c 100000000 /dev/zero >big", "ended with code"),
    ],
)
def test_a_program_that_breaks_says_how(functions: Path, text: str, why: str) -> None:
    assert why_not(program(functions, text), timeout_s=60).startswith(why)


def test_a_program_that_takes_too_long_is_stopped(functions: Path) -> None:
    assert why_not(program(functions, "sleep 60"), timeout_s=0.5) == "it took longer than 0.5 s"


def test_a_program_that_leaves_another_running_has_answered(functions: Path) -> None:
    began = time.monotonic()
    with sandbox(program(functions, "sleep 600 & echo $!")) as box:
        pid = json.loads(box.ask(TRAJECTORY))
        assert time.monotonic() - began < 60
    assert wait_until_over(pid, 60)


def test_a_process_whose_worker_is_gone_ends_by_itself(functions: Path) -> None:
    told = functions / "pid"
    worker = f"""
import json, os, threading, time
from judge.reward_functions.sandbox import Sandbox
from whetstone.config.rewards import RewardFunction
box = Sandbox(RewardFunction(name="f", run="functions:tells_and_sleeps", timeout_s=1))
asking = threading.Thread(target=box.ask, args=(json.dumps({{"path": {str(told)!r}}}).encode(),), daemon=True)
asking.start()
while not os.path.exists({str(told)!r}): time.sleep(0.01)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", worker], check=True, timeout=30)
    pid = int(told.read_text())
    assert is_running(pid)
    assert wait_until_over(pid, 15)
