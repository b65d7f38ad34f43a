"""A step that is not taken: it shows what one would take and teach, and leaves the database as it was."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, update

from migrations import schema
from trainer.domain.row_builder import build_rows
from trainer.step.dry_run import DryRun, dry_run
from trainer.store.unit_of_work import Store
from whetstone.config.settings import Settings, SettingsError, as_environment
from whetstone.config.trainer import TrainerSettings
from whetstone.database.engine import snapshot

RULES = TrainerSettings(groups_per_step=2, min_groups_per_step=1, min_fresh_share=0.3)


class Tables:
    """Groups, singles, and what is wrong with some of them."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed

    def group(self, group_id: str, rewards: tuple[float, ...] = (0.0, 1.0), turns: int = 2, **values: Any) -> None:
        row = {"state": "scored", "closed_at": datetime.now(UTC)} | values
        self.seed.group(group_id, size=len(rewards), rewarded=len(rewards), **row)
        for number, reward in enumerate(rewards):
            self.seed.trajectory(f"{group_id}-{number}", group_id, turns=turns, state="rewarded", reward=reward)

    def single(self, name: str, reward: float) -> None:
        self.group(name, (reward,), formed_by="single", compared_with="baseline")

    def write(self, table: Any, row_id: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(table.c.id == row_id).values(**values))

    def dry_run(self, policy: str = "starter", **rules: Any) -> DryRun:
        settings = RULES.model_copy(update=rules)
        with snapshot(self.engine.url.render_as_string(hide_password=False)) as connection:
            return dry_run(connection, "default", policy, settings, datetime.now(UTC))

    def all(self) -> list[Any]:
        with self.engine.connect() as connection:
            return [list(connection.execute(select(table))) for table in schema.metadata.sorted_tables]


@pytest.fixture
def tables(engine: Engine, seed: Any) -> Tables:
    return Tables(engine, seed)


def fill(tables: Tables) -> None:
    """All that a step meets: groups, singles with and without a baseline, and trajectories that cannot teach."""
    tables.group("g")
    tables.group("h", (0.2, 0.4, 0.9))
    tables.group("u", (0.5, 0.5))
    tables.group("lost")
    tables.write(schema.trajectories, "lost-0", first_version=7)
    for name, reward in (("s", 1.0), ("t", 0.0), ("rare", 0.3)):
        tables.single(name, reward)
    tables.write(schema.trajectories, "rare-0", task="rare")
    tables.write(schema.completions, "h-1-0", why_not_trained="greedy")
    tables.write(schema.completions, "h-1-1", why_not_trained="greedy")
    tables.write(schema.completions, "g-1-1", prompt_token_ids=[90, 91], follows=None)  # forks


def test_it_shows_the_very_step_that_is_taken_next(tables: Tables) -> None:
    fill(tables)
    found = tables.dry_run()
    store = Store(tables.engine, "default")
    claim = store.claim("starter", RULES)
    assert claim is not None
    members = store.members(claim)
    taught = build_rows(members, RULES.max_row_tokens)
    assert found.why_not_due is None and found.version_in == claim.version_in
    assert [(one.group_id, one.trajectory_id, one.reward) for one in found.trajectories] == [
        (member.group_id, member.trajectory_id, member.reward) for member in members
    ]
    assert {one.trajectory_id: one.advantage for one in found.trajectories if not one.left_out} == taught.advantages
    assert {one.trajectory_id: one.left_out for one in found.trajectories if one.left_out} == taught.left_out
    assert taught.left_out == {"h-1": "greedy", "rare-0": "too_few"}
    assert [row.token_ids_T for row in found.rows] == [row.token_ids_T for row in taught.rows]
    with tables.engine.connect() as connection:
        step = connection.execute(select(schema.steps)).one()
    assert {reason: len(ids) for reason, ids in found.discarded.items()} == step.discarded
    assert found.discarded == {"off_lineage": ("lost",), "group_uniform": ("u",)}


def test_each_trajectory_comes_with_its_figures(tables: Tables) -> None:
    fill(tables)
    shown = {one.trajectory_id: one for one in tables.dry_run().trajectories}
    merged, forked, single = shown["g-0"], shown["g-1"], shown["s-0"]
    assert (merged.reward, merged.baseline, merged.advantage) == (0.0, 0.5, -0.5)
    assert (merged.completions, merged.rows, merged.read_tokens, merged.sampled_tokens) == (2, 1, 8, 4)
    assert (forked.completions, forked.rows, forked.read_tokens, forked.sampled_tokens) == (2, 2, 8, 4)
    assert (single.baseline, single.advantage, single.versions) == (0.0, 1.0, (0,))
    silent = shown["h-1"]
    assert (silent.baseline, silent.advantage, silent.completions, silent.rows) == (None, None, 0, 0)


def test_by_state_prompts_of_other_groups_count_unless_a_judge_ranked_them(tables: Tables) -> None:
    tables.group("g", (0.0, 1.0), turns=1)
    tables.group("h", (0.5, 1.0), turns=1)
    for name in ("g-0", "g-1", "h-0", "h-1"):
        tables.write(schema.trajectories, name, reward_source="trajectory")

    def advantages(**rules: Any) -> list[float | None]:
        return [one.advantage for one in tables.dry_run(**rules).trajectories]

    assert advantages() == [-0.5, 0.5, -0.25, 0.25]
    assert advantages(baseline="state") == [-0.625, 0.375, -0.125, 0.375]
    tables.seed.feedback("h", kind="group", source="judge", state="applied", rewards={"h-0": 0.5, "h-1": 1.0})
    assert advantages(baseline="state") == [-0.5, 0.5, -0.25, 0.25]


def test_scaled_advantages_are_shown_scaled(tables: Tables) -> None:
    tables.group("g")
    shown = tables.dry_run(advantage_scale="group").trajectories
    assert [one.advantage for one in shown] == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])


def test_where_none_is_due_it_says_why_and_shows_what_one_by_hand_would_take(tables: Tables) -> None:
    tables.group("g")
    found = tables.dry_run()
    assert found.why_not_due == "1 of 2 groups are there"
    assert [one.trajectory_id for one in found.trajectories] == ["g-0", "g-1"]


@pytest.mark.parametrize(
    ("state", "why"), [("recording", "the policy only records"), ("paused", "the policy is paused")]
)
def test_a_policy_that_does_not_train_says_so(tables: Tables, state: str, why: str) -> None:
    for name in "gh":
        tables.group(name)
    tables.write(schema.policies, "starter", state=state)
    found = tables.dry_run()
    assert found.why_not_due is not None and found.why_not_due.startswith(why)
    assert len(found.trajectories) == 4


def test_a_step_that_is_under_way_is_told_and_what_it_has_is_not_shown(tables: Tables) -> None:
    for name in "gh":
        tables.group(name)
    assert Store(tables.engine, "default").claim("starter", RULES) is not None
    tables.group("later")
    found = tables.dry_run()
    assert found.why_not_due == "step 1 is under way"
    assert {one.group_id for one in found.trajectories} == {"later"}


def test_nothing_to_train_on_is_told(tables: Tables) -> None:
    found = tables.dry_run()
    assert (found.why_not_due, found.trajectories, found.rows) == ("no group is scored", (), ())


def test_an_unknown_policy_is_told_which_there_are(tables: Tables) -> None:
    with pytest.raises(SettingsError, match="there is no policy 'nobody'; there are: starter"):
        tables.dry_run("nobody")


def test_rewards_that_would_drown_all_others_are_told(tables: Tables) -> None:
    tables.group("g", (1.7e308, -1.7e308, -1.7e308))
    assert {one.left_out for one in tables.dry_run().trajectories} == {"reward_too_large"}


def test_it_leaves_every_row_as_it_was(tables: Tables) -> None:
    fill(tables)
    before = tables.all()
    tables.dry_run()
    assert tables.all() == before


class Command:
    """`python -m trainer` on a data folder."""

    def __init__(self, tables: Tables, data: Path) -> None:
        url = tables.engine.url.render_as_string(hide_password=False)
        settings = Settings(data=data, database=url, trainer=RULES)
        self._environment = {**os.environ, **as_environment(settings, config=Path(os.devnull)), "COLUMNS": "200"}
        self.cwd = data

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer", *arguments]
        environment = self._environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[4])}
        ended = subprocess.run(command, env=environment, cwd=self.cwd, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended


@pytest.fixture
def command(tables: Tables, tmp_path: Path) -> Command:
    return Command(tables, tmp_path)


def test_it_is_shown_as_a_table_and_in_words(tables: Tables, command: Command) -> None:
    fill(tables)
    ended = command.run()
    assert ended.returncode == 0, ended.stderr
    shown = " ".join(ended.stdout.replace("│", " ").split())
    assert "g g-1 1 0.5 +0.5000 2 > 2 8 / 4 0" in shown
    assert "h h-1 0.4 – – 0 > 0 0 / 0 – greedy" in shown
    assert "off_lineage 1 lost" in shown
    assert "a step of starter is due; nothing was written" in shown
    assert "it would take 5 groups with 8 trajectories, of which 6 teach" in shown
    assert "[3] [4]" not in shown


def test_rows_are_spelled_with_what_is_trained_in_brackets(tables: Tables, command: Command) -> None:
    tables.group("g", turns=2)
    ended = command.run("starter", "--rows")
    assert "g-0 -0.5000: 1 2 [3] [4] 11 12 [13] [14]" in ended.stdout


def test_as_json_it_has_everything(tables: Tables, command: Command) -> None:
    fill(tables)
    told = json.loads(command.run("--json").stdout)
    assert told["discarded"] == {"off_lineage": ["lost"], "group_uniform": ["u"]}
    assert len(told["trajectories"]) == 8
    row = next(row for row in told["rows"] if row["trajectory_id"] == "g-0")
    assert row["token_ids_T"] == [1, 2, 3, 4, 11, 12, 13, 14]
    assert row["sampled_T"] == [False, False, True, True] * 2
    assert row["inference_logprobs_T"] == [None, None, -0.5, -0.25] * 2
    assert row["advantages_T"] == [0.0, 0.0, -0.5, -0.5] * 2


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_not_a_byte_of_the_file_changes(tables: Tables, command: Command) -> None:
    fill(tables)
    tables.engine.dispose()
    path = Path(str(tables.engine.url.database))
    before, files = path.read_bytes(), sorted(path.parent.iterdir())
    assert command.run("--json").returncode == 0
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == files


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_an_older_database_is_not_moved(tables: Tables, command: Command) -> None:
    with tables.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0004'"))
    tables.engine.dispose()
    before = Path(str(tables.engine.url.database)).read_bytes()
    ended = command.run()
    assert ended.returncode == 2 and "cannot be upgraded: export what you need" in ended.stderr
    assert Path(str(tables.engine.url.database)).read_bytes() == before


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_mistakes_end_with_their_code(tables: Tables, command: Command) -> None:
    unknown = command.run("nobody")
    assert (unknown.returncode, unknown.stdout) == (2, "") and "there is no policy 'nobody'" in unknown.stderr


def test_it_needs_no_torch() -> None:
    said = "import sys, trainer.__main__; print(sorted({'torch', 'transformers', 'peft'} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n", ended.stderr
