"""Lists of the command line: whole in a pipe and with --wide; changes print JSON."""

import json
from typing import Any

import pytest

from tests.unit.whetstone.cli.commands.test_trajectories import Here, filled, here

__all__ = ["here"]


def as_json(here: Here, *arguments: str) -> Any:
    """Return what a command prints as JSON."""
    result = here.run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


LONG = "an-id-that-the-app-made-" + "x" * 60


@pytest.mark.parametrize(("arguments", "terminal"), [((), False), (("--wide",), True)])
def test_a_pipe_and_wide_show_whole_ids_and_every_column(
    here: Here, arguments: tuple[str, ...], terminal: bool
) -> None:
    filled(here)
    here.seed.trajectory(LONG, task="a task of many words, with a label", why_not_trained="waiting_for_more_siblings")
    result = here.run("trajectories", *arguments, terminal=terminal)
    (line,) = (line for line in result.stdout.splitlines() if LONG in line)
    assert "a task of many words, with a label" in line and "waiting_for_more_siblings" in line
    assert "…" not in result.stdout and "not shown" not in result.stdout


def test_a_narrow_terminal_has_a_line_for_each_object_and_names_what_it_leaves_out(here: Here) -> None:
    filled(here)
    here.seed.trajectory(LONG, why_not_trained="waiting_for_more_siblings")
    lines = here.run("trajectories", terminal=True).stdout.splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert lines[-1].startswith("not shown: task") and "waiting_for_more_siblings" in "\n".join(lines)


def test_what_changes_something_prints_what_it_changed(here: Here) -> None:
    assert as_json(here, "policies", "train", "off") == {"policy": "starter", "state": "recording"}
    created = as_json(here, "keys", "create", "--name", "app", "--scope", "inference")
    assert created["key"].startswith("wsk_") and created["scopes"] == ["inference"] and created["name"] == "app"
    assert as_json(here, "keys", "revoke", created["key_id"]) == {"key_id": created["key_id"], "revoked": True}
    assert as_json(here, "versions", "promote", "starter", "0") == {
        "policy": "starter",
        "before": 0,
        "live_version": 0,
        "rejected": [],
    }
