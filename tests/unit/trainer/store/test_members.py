"""What is read of a step's trajectories: whose rewards are on one scale."""

from typing import Any

import pytest
from sqlalchemy import Engine, event, select

from migrations import schema
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings

RULES = TrainerSettings(groups_per_step=1, min_groups_per_step=1, min_fresh_share=0)


def scales(engine: Engine, seed: Any, group: str = "g", task: str | None = None, **values: Any) -> set[str | None]:
    """Return the scales of the members of a scored group that the next step takes."""
    seed.group(group, size=2, rewarded=2, state="scored", closed_at=seed.now)
    for number, reward in enumerate((0.0, 1.0)):
        seed.trajectory(f"{group}-{number}", group, state="rewarded", reward=reward, task=task, **values)
    store = Store(engine, "default")
    claim = store.claim("starter", RULES)
    assert claim is not None
    return {member.reward_scale for member in store.members(claim)}


@pytest.mark.parametrize("source", ["trajectory", "completions", "code", "failure"])
def test_a_reward_of_the_trajectory_itself_is_on_the_scale_of_its_task(engine: Engine, seed: Any, source: str) -> None:
    assert scales(engine, seed, task="chess", reward_source=source) == {"chess"}


def test_without_a_task_all_are_on_one_scale(engine: Engine, seed: Any) -> None:
    assert scales(engine, seed, reward_source="trajectory") == {""}


@pytest.mark.parametrize("source", ["judge", "group", None])
def test_what_may_be_a_rank_has_no_scale(engine: Engine, seed: Any, source: str | None) -> None:
    assert scales(engine, seed, task="chess", reward_source=source) == {None}


def test_an_apps_reward_to_which_a_judges_score_may_be_added_has_no_scale(engine: Engine, seed: Any) -> None:
    seed.feedback("g", kind="group", source="judge", state="applied")
    seed.feedback("other", kind="group", source="judge", state="applied")
    assert scales(engine, seed, reward_source="trajectory") == {None}


def test_a_judge_of_another_group_or_of_a_trajectory_of_that_name_leaves_the_scale(engine: Engine, seed: Any) -> None:
    seed.feedback("other", kind="group", source="judge", state="applied")
    seed.feedback("g", 0.5, source="judge", state="applied")
    seed.feedback("g", kind="group", source="close", state="applied")
    assert scales(engine, seed, reward_source="trajectory") == {""}


def earned(engine: Engine, seed: Any, **values: Any) -> dict[str, dict[int, float]]:
    """Return what the members of a group of two, of two turns each, earned at their steps."""
    seed.group("g", size=2, rewarded=2, state="scored", closed_at=seed.now)
    for name, reward in (("a", 0.0), ("b", 1.0)):
        seed.trajectory(name, "g", turns=2, state="rewarded", reward=reward, **{"reward_source": "steps"} | values)
    store = Store(engine, "default")
    claim = store.claim("starter", RULES)
    assert claim is not None
    return {member.trajectory_id: dict(member.step_rewards) for member in store.members(claim)}


def step_reward(seed: Any, completion: str, reward: float | None, **values: Any) -> None:
    trajectory = completion.partition("-")[0]
    applied = {"state": "applied", "trajectory_id": trajectory, "completion_id": completion, "credit": "step"}
    seed.feedback(completion, reward, kind="completion", **applied | values)


def test_what_was_earned_at_steps_is_read_by_turn_and_the_last_feedback_counts(engine: Engine, seed: Any) -> None:
    step_reward(seed, "a-0", 0.25)
    step_reward(seed, "a-0", 0.5)
    step_reward(seed, "a-1", -1.0)
    step_reward(seed, "b-1", 2.0, credit=None)
    step_reward(seed, "b-1", 3.0, state="superseded")
    assert earned(engine, seed) == {"a": {0: 0.5, 1: -1.0}, "b": {}}


def test_a_veto_replaces_what_was_earned(engine: Engine, seed: Any) -> None:
    step_reward(seed, "a-0", 0.25)
    assert earned(engine, seed, reward_source="code") == {"a": {}, "b": {}}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


@pytest.mark.parametrize(("tools", "expected"), [(True, [0, 2, 0, 2]), (False, [0, 0, 0, 0])])
def test_what_tools_gave_between_two_answers_is_counted_where_it_is_wanted(
    engine: Engine, seed: Any, tools: bool, expected: list[int]
) -> None:
    seed.group("g", size=2, rewarded=2, state="scored", closed_at=seed.now)
    for name, reward in (("a", 0.0), ("b", 1.0)):
        seed.trajectory(name, "g", turns=4, state="rewarded", reward=reward, reward_source="trajectory")
    c, user = schema.completions.c, {"role": "user", "content": "and then?"}
    with engine.begin() as connection:
        for turn, messages in enumerate(([RESULT], [RESULT, RESULT], [RESULT, user], [RESULT])):
            connection.execute(schema.completions.update().where(c.turn == turn).values(new_messages=messages))
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    store = Store(engine, "default")
    claim = store.claim("starter", RULES)
    assert claim is not None
    for member in store.members(claim, tools=tools):
        assert [one.tool_tokens for one in member.completions] == expected
    assert any("completions.new_messages" in one for one in statements) == tools


@pytest.mark.parametrize("source", ["judge", "trajectory"])
def test_whose_last_answer_a_length_limit_ended_and_who_was_judged(engine: Engine, seed: Any, source: str) -> None:
    seed.group("g", size=2, rewarded=2, state="scored", closed_at=seed.now)
    for name, reward in (("a", 0.0), ("b", 1.0)):
        seed.trajectory(name, "g", turns=2, state="rewarded", reward=reward, reward_source=source)
    c, t = schema.completions.c, schema.trajectories.c
    with engine.begin() as connection:
        for name, turn in (("a", 1), ("b", 0)):
            of_turn = (c.trajectory_id == name, c.turn == turn)
            connection.execute(schema.completions.update().where(*of_turn).values(finish_reason="length"))
        tails = {row.trajectory_id: row.id for row in connection.execute(select(schema.completions).where(c.turn == 1))}
        for name, tail in tails.items():
            connection.execute(schema.trajectories.update().where(t.id == name).values(tail_completion_id=tail))
    store = Store(engine, "default")
    claim = store.claim("starter", RULES)
    assert claim is not None
    members = store.members(claim)
    assert {member.trajectory_id: member.cut_off for member in members} == {"a": True, "b": False}
    assert {member.judged for member in members} == {source == "judge"}
