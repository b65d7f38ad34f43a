"""`whetstone replay` against a real proxy: how it records the calls, and that the trajectory stays as it was."""

import json

from typer.testing import CliRunner

from migrations import schema
from tests.unit.proxy.conftest import RunningProxy, fake_vllm, plain_proxy, sqlite_url, start
from tests.unit.whetstone.doctor.test_vllm_checks import write_addresses
from whetstone.cli.main import app

__all__ = ["fake_vllm", "plain_proxy", "sqlite_url", "start"]


def test_replayed_calls_are_trajectories_of_their_own_that_no_step_takes(plain_proxy: RunningProxy) -> None:
    first = {"role": "user", "content": "hi"}
    answer = plain_proxy.chat({"X-Trajectory-Id": "game", "X-Task": "x"}).json()["choices"][0]["message"]
    later = [first, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "more"}]
    plain_proxy.chat({"X-Trajectory-Id": "game", "X-Task": "x"}, messages=later)
    plain_proxy.recorded(2)
    data = plain_proxy.settings.data
    write_addresses(data, proxy=plain_proxy.url, database=plain_proxy.settings.database_url)
    result = CliRunner().invoke(app, ["replay", "game", "--version", "v0", "--json", "--data", str(data)])
    assert result.exit_code == 0, result.output
    assert [(one["turn"], one["same"], one["version"]) for one in json.loads(result.stdout)] == [
        (0, True, "starter@v0"), (1, True, "starter@v0"),
    ]  # fmt: skip
    calls = plain_proxy.recorded(4)
    rows = {row.id: row for row in plain_proxy.rows(schema.trajectories)}
    game = rows.pop("game")
    assert (game.completions, game.split, game.no_train) == (2, "train", False)
    of_game = [call.id for call in calls if call.trajectory_id == "game"]
    assert [row.metadata for row in rows.values()] == [{"replay_of": call} for call in of_game]
    assert {(row.split, row.no_train, row.task, row.completions) for row in rows.values()} == {("eval", True, "x", 1)}
    assert all(name.startswith("replay-") for name in rows)
