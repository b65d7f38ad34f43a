"""What `/metrics` tells of steps: the last one's figures, totals, and a scrape that reads only what has ended since."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, event, update

from migrations import schema
from proxy.metrics import OF_LAST_STEP, exposition
from proxy.store_steps import StepTables
from tests.conftest import Seed
from tests.proxy.conftest import RunningProxy

FIGURES: dict[str, Any] = {
    "loss": -0.25, "reward_mean": 0.5, "advantage_spread": 0.4, "kl": 0.01, "entropy": 2.0, "masked_share": 0.125,
    "mismatch_k3": 1e-5, "grad_norm": 3.0, "learning_rate": 1e-3, "tokens_per_s": 40.0, "seconds": 5.0,
    "completions": 16, "rows": 4, "read_tokens": 900, "sampled_tokens": 200, "phases": {"train": 3.5, "write": 0.25},
}  # fmt: skip


def step(seed: Seed, number: int, state: str = "promoted", policy: str = "starter", **values: Any) -> None:
    ended = None if state == "claimed" else seed.now + timedelta(seconds=number)
    row = {
        "project": "default", "id": f"{policy}#{number}", "policy": policy, "number": number, "state": state,
        "version_in": 0, "groups": 1, "trajectories": 2, "config": {}, "attempt": 1, "created_at": seed.now,
        "ended_at": ended,
    }  # fmt: skip
    seed.insert(schema.steps, **(row | values))


def told(tables: StepTables) -> dict[tuple[str, ...], float]:
    """Samples by name, policy and the other label's value, as Prometheus reads them."""
    found: dict[tuple[str, ...], float] = {}
    text = exposition(0, 0, None, {}, None, tables.read()).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            others = [value for label, value in sample.labels.items() if label != "policy"]
            found[sample.name, sample.labels.get("policy", ""), *others] = sample.value
    return found


@pytest.fixture
def tables(engine: Engine, seed: Seed) -> StepTables:
    assert seed.engine is engine
    return StepTables(engine, "default")


def test_the_last_steps_figures_stand_under_their_names(tables: StepTables, seed: Seed) -> None:
    step(seed, 1, **(FIGURES | {"loss": 99.0, "sampled_tokens": 1000}))
    step(seed, 2, **FIGURES)
    found = told(tables)
    for column, (name, _) in OF_LAST_STEP.items():
        assert found[name, "starter"] == FIGURES[column], column
    assert found["whetstone_step_rows", "starter", "no"] == 16
    assert found["whetstone_step_rows", "starter", "yes"] == 4
    assert found["whetstone_step_phase_seconds", "starter", "train"] == 3.5
    assert found["whetstone_step_sampled_tokens_total", "starter"] == 1200


def test_steps_and_discarded_groups_are_counted_by_state_and_reason(tables: StepTables, seed: Seed) -> None:
    step(seed, 1, discarded={"stale": 2})
    step(seed, 2, "rejected", discarded={"stale": 1, "group_uniform": 4})
    step(seed, 3, "noop")
    step(seed, 4)
    found = told(tables)
    assert found["whetstone_steps_total", "starter", "promoted"] == 2
    assert found["whetstone_steps_total", "starter", "rejected"] == 1
    assert found["whetstone_steps_total", "starter", "noop"] == 1
    assert found["whetstone_groups_discarded_total", "starter", "stale"] == 3
    assert found["whetstone_groups_discarded_total", "starter", "group_uniform"] == 4


def test_what_a_step_did_not_measure_is_left_out(tables: StepTables, seed: Seed) -> None:
    assert {name for name, *_ in told(tables) if name.startswith("whetstone_step_")} == {
        "whetstone_step_sampled_tokens_total"
    }
    step(seed, 1, **(FIGURES | {"mismatch_k3": None, "loss": 0.0}))
    found = told(tables)
    assert ("whetstone_step_mismatch_k3", "starter") not in found
    assert found["whetstone_step_loss", "starter"] == 0.0


def test_a_step_under_way_counts_once_it_is_over(tables: StepTables, seed: Seed, engine: Engine) -> None:
    step(seed, 1, **FIGURES)
    step(seed, 2, "claimed")
    assert told(tables)["whetstone_steps_total", "starter", "promoted"] == 1
    with engine.begin() as connection:
        ended = update(schema.steps).where(schema.steps.c.number == 2)
        connection.execute(ended.values(state="promoted", ended_at=seed.now, loss=0.75, sampled_tokens=7))
    found = told(tables)
    assert found["whetstone_steps_total", "starter", "promoted"] == 2
    assert found["whetstone_step_loss", "starter"] == 0.75
    assert found["whetstone_step_sampled_tokens_total", "starter"] == 207


def test_a_scrape_reads_only_what_has_ended_since_the_one_before(
    tables: StepTables, seed: Seed, engine: Engine
) -> None:
    for number in range(1, 301):
        step(seed, number, **FIGURES)
    first = told(tables)
    fetched = []

    def count(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "FROM steps" in statement:
            fetched.append(statement)

    event.listen(engine, "after_cursor_execute", count)
    assert told(tables) == first
    assert len(fetched) == 1 and "steps.number >" in fetched[0]
    step(seed, 301, **FIGURES)
    assert told(tables)["whetstone_steps_total", "starter", "promoted"] == 301


def test_policies_are_told_apart_and_other_projects_are_not_told(
    tables: StepTables, seed: Seed, engine: Engine
) -> None:
    seed.project("other")
    step(seed, 1, project="other", **FIGURES)
    seed.insert(
        schema.policies, project="default", id="second", base_model="second@v0", model_path="/m", live_version=0,
        next_version=1, next_step=2, state="training", created_at=seed.now,
    )  # fmt: skip
    step(seed, 1, "failed", policy="second")
    with engine.begin() as connection:
        connection.execute(update(schema.policies).where(schema.policies.c.id == "starter").values(live_version=3))
    found = told(tables)
    assert {key for key in found if key[0] == "whetstone_steps_total"} == {
        ("whetstone_steps_total", "second", "failed")
    }
    assert (found["whetstone_live_version", "starter"], found["whetstone_live_version", "second"]) == (3, 0)


def test_a_policy_that_another_server_answers_for_has_no_steps_to_tell(tables: StepTables, seed: Seed) -> None:
    seed.insert(
        schema.policies, project="default", id="teacher", base_model="gpt", model_path="", live_version=0,
        next_version=1, next_step=1, state="recording", created_at=seed.now, upstream="openai",
    )  # fmt: skip
    assert [one.policy for one in tables.read()] == ["starter"]


def test_a_running_proxy_tells_of_steps(proxy: RunningProxy) -> None:
    text = proxy.client.get("/metrics").text
    assert 'whetstone_live_version{policy="starter"} 0.0' in text
    assert "whetstone_unwritten_calls 0.0" in text
