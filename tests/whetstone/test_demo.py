"""The demo's small parts: what it empties, what it calls a rise, what it prints of a step."""

import fcntl
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whetstone.alone import LOCK
from whetstone.demo import MARK, Outcome, _cells, _empty, _line
from whetstone.intervals import Interval, gain, share
from whetstone.settings import SettingsError
from whetstone.store import Rewards

QUIET = Console(quiet=True)


def outcome(first: list[int], last: list[int], failed_requests: int = 0) -> Outcome:
    return Outcome(share(first), share(last), gain(first, last), 3, failed_requests, {})


def test_a_rise_is_one_whose_intervals_do_not_overlap() -> None:
    assert outcome([1] * 40 + [0] * 60, [1] * 80 + [0] * 20).rose
    assert not outcome([1] * 40 + [0] * 60, [1] * 45 + [0] * 55).rose
    assert not outcome([1] * 80 + [0] * 20, [1] * 40 + [0] * 60).rose


def test_intervals_that_touch_do_overlap() -> None:
    low, high = Interval(0.3, 0.2, 0.4), Interval(0.5, 0.4, 0.6)
    assert not Outcome(low, high, high, 1, 0, {}).rose


def test_a_demo_whose_requests_failed_did_not_succeed() -> None:
    assert not outcome([0] * 100, [1] * 100, failed_requests=1).rose


def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    _empty(tmp_path / "a" / "demo", QUIET)
    assert {path.name for path in (tmp_path / "a" / "demo").iterdir()} == {MARK, LOCK}


def test_what_the_last_demo_left_is_removed(tmp_path: Path) -> None:
    _empty(tmp_path, QUIET)
    (tmp_path / "whetstone.db").write_bytes(b"old")
    (tmp_path / "adapters" / "starter@v1").mkdir(parents=True)
    kept = tmp_path.parent / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "link").symlink_to(kept)
    _empty(tmp_path, QUIET)
    assert {path.name for path in tmp_path.iterdir()} == {MARK, LOCK}
    assert (kept / "file").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "whetstone.db"])
def test_a_folder_that_is_not_a_demos_is_not_emptied_not_even_that_of_a_stack(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("years of work")
    with pytest.raises(SettingsError, match=r"something else.*--data"):
        _empty(tmp_path, QUIET)
    assert (tmp_path / name).read_text() == "years of work"


def test_the_folder_of_a_demo_that_still_runs_is_not_emptied(tmp_path: Path) -> None:
    _empty(tmp_path, QUIET)
    (tmp_path / "whetstone.db").write_bytes(b"in use")
    with (tmp_path / LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="a stack runs"):
            _empty(tmp_path, QUIET)
    assert (tmp_path / "whetstone.db").exists()


def test_a_folder_that_cannot_be_made_is_a_clear_error() -> None:
    with pytest.raises(SettingsError, match="cannot be written.*--data"):
        _empty(Path("/proc/nobody/writes/here"), QUIET)


def step(**values: Any) -> dict[str, Any]:
    names = ("tokens_per_s", "version_out", "mismatch_k3", "kl", "seconds")
    return {"number": 7, "state": "promoted", "version_in": 3, **dict.fromkeys(names)} | values


def test_a_steps_line_shows_its_figures() -> None:
    line = _line(step(version_out=4, mismatch_k3=1.2e-6, seconds=3.14), {3: Rewards(0.5, 0.25, 100)})
    assert "step 7  reward 0.500  spread ±0.250" in line
    assert "live v4" in line and "k3 1.2e-06" in line and "seconds 3.1" in line


def test_what_was_not_measured_is_not_shown_as_zero() -> None:
    cells = _cells(step(state="noop"), {})
    assert "0" not in "".join(cells) and cells[4] == "noop" and cells.count("–") == 5
