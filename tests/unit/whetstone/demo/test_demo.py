"""The demo's small parts: what it empties, what it calls a rise, what it prints of a step."""

import fcntl
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from whetstone.config.settings import SettingsError, load
from whetstone.demo.curve import in_text, smooth
from whetstone.demo.demo import MARK, SHOWN_STEPS, Outcome, _cells, _curve, _empty, _for_steps, _line, _steps_table
from whetstone.domain.stats import Interval, gain, share
from whetstone.registry.projects import Rewards
from whetstone.stack.data_lock import LOCK

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


def test_the_curve_in_text_has_a_column_for_each_version_and_fits_its_room() -> None:
    rising = [0.4 + 0.01 * version for version in range(33)]
    lines = in_text(rising, width=80, height=6)
    assert len(lines) == 8
    assert lines[0].startswith("  0.72 ┤") and lines[5].startswith("  0.40 ┤")
    assert lines[0].index("·") > lines[5].index("·"), "what rises ends above its beginning"
    assert "".join(lines).count("●") == 33
    assert lines[7].split() == ["v0", "v32"]
    assert max(map(len, in_text(rising * 9, width=40))) <= 40


def test_a_flat_curve_and_a_single_version_can_be_drawn_and_none_at_all_is_nothing() -> None:
    assert in_text([0.5, 0.5, 0.5], width=80)[0].startswith("  0.55 ┤")
    assert any("●" in line for line in in_text([0.0], width=80))
    assert in_text([], width=80) == []


def test_a_version_that_has_hardly_played_is_not_drawn() -> None:
    console = Console(width=80)
    few, many = Rewards(0.5, 0.5, 3), Rewards(0.5, 0.5, 300)
    assert _curve({0: few}, console) == []
    assert sum("●" in line.plain for line in _curve({0: many, 1: few}, console)[1:]) == 1


def test_the_running_mean_takes_what_there_is_at_its_ends() -> None:
    assert smooth([0.0, 1.0]) == [0.5, 0.5]
    assert smooth([0.0] * 5 + [1.0] * 5)[0] == 0.0
    assert smooth([1.0] * 20) == [1.0] * 20


def test_the_training_worker_gives_way_to_nobody_unless_the_settings_say_so(tmp_path: Path) -> None:
    assert _for_steps(load(environment={}, data=tmp_path)).trainer.niceness == 0
    assert _for_steps(load(environment={}, data=tmp_path, trainer__niceness=7)).trainer.niceness == 7
    assert _for_steps(load(environment={"WHETSTONE_TRAINER__LORA_RANK": "8"})).trainer.lora_rank == 8


def test_what_is_shown_while_it_runs_fits_a_terminal_of_24_lines() -> None:
    console = Console(width=80, height=24, file=io.StringIO())
    rewards = dict.fromkeys(range(33), Rewards(0.5, 0.5, 300))
    shown = [_steps_table([step(number=number) for number in range(SHOWN_STEPS)], rewards), *_curve(rewards, console)]
    for part in shown:
        console.print(part)
    assert len(console.file.getvalue().splitlines()) < 24, "and the bar below"
