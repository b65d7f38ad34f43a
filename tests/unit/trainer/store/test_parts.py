"""What is read of the parts of rewards, and which groups of equal rewards they keep in a step."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event

from trainer.domain.advantages import RewardPart
from trainer.domain.claims import Member
from trainer.step.dry_run import dry_run
from trainer.store.unit_of_work import Store
from whetstone.config.rewards import RewardFunction, RewardSettings, RulerSettings
from whetstone.config.settings import Settings
from whetstone.config.trainer import TrainerSettings

RULES = TrainerSettings(groups_per_step=1, min_groups_per_step=1, min_fresh_share=0, advantage_scale="parts")
LEARNING = RewardSettings(
    weights={"right": 2.0},
    rewards=(RewardFunction(name="lint", run="a:b", weight=0.5), RewardFunction(name="bad", run="a:c", kind="veto")),
)
PARTS = {"right": 1.0, "short": 0.5}


class Group:
    """A scored group of two; what is given to `a` is tested, `b` has reward 0."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed

    def make(self, reward: float, source: str, other: float = 0.0, **values: Any) -> None:
        self.seed.group("g", size=2, rewarded=2, state="scored", closed_at=self.seed.now)
        for name, number in (("a", reward), ("b", other)):
            of_code = values if name == "a" else {}
            row = {"state": "rewarded", "reward": number, "reward_source": source, "turns": 2}
            self.seed.trajectory(name, "g", **row | of_code)

    def feedback(self, target: str, reward: float, parts: dict[str, float] | None = None, **values: Any) -> None:
        trajectory, _, turn = target.partition("-")
        kind = "completion" if turn else "trajectory"
        named = {"trajectory_id": trajectory, "completion_id": target if turn else None, "state": "applied"}
        self.seed.feedback(target, reward, kind=kind, parts=parts, **named | values)

    def members(self, learning: RewardSettings | None = LEARNING) -> dict[str, Member]:
        store = Store(self.engine, "default")
        claim = store.claim("starter", RULES, learning)
        return {} if claim is None else {one.trajectory_id: one for one in store.members(claim, learning)}

    def parts(self, learning: RewardSettings = LEARNING) -> dict[str, tuple[float, float]]:
        """Return name -> number and weight of the parts of `a`."""
        return {name: (part.number, part.weight) for name, part in self.members(learning)["a"].parts.items()}


@pytest.fixture
def group(engine: Engine, seed: Any) -> Group:
    return Group(engine, seed)


def test_parts_of_feedback_have_the_policys_weights(group: Group) -> None:
    group.make(2.5, "trajectory")
    group.feedback("a", 2.5, PARTS)
    assert group.parts() == {"feedback/right": (1.0, 2.0), "feedback/short": (0.5, 1.0)}


def test_the_last_feedback_counts_and_that_on_completions_does_not_beside_it(group: Group) -> None:
    group.make(2.0, "trajectory")
    group.feedback("a", 9.0, {"right": 4.5})
    group.feedback("a", 2.0, {"right": 1.0}, created_at=group.seed.now + timedelta(seconds=1))
    group.feedback("a-1", 7.0, {"right": 3.5}, created_at=group.seed.now + timedelta(seconds=2))
    assert group.parts() == {"feedback/right": (1.0, 2.0)}


def test_of_completions_parts_have_their_mean(group: Group) -> None:
    group.make(2.0, "completions")
    group.feedback("a-0", 3.0, {"right": 1.0, "short": 1.0})
    group.feedback("a-1", 1.0, {"right": 0.0, "short": 1.0})
    assert group.parts() == {"feedback/right": (0.5, 2.0), "feedback/short": (1.0, 1.0)}


def test_completions_with_other_parts_have_one_number_together(group: Group) -> None:
    group.make(1.5, "completions")
    group.feedback("a-0", 2.0, {"right": 1.0})
    group.feedback("a-1", 1.0, {"short": 1.0})
    assert group.parts() == {"given": (1.5, 1.0)}


def test_numbers_of_functions_are_parts_beside_what_the_app_gave(group: Group) -> None:
    group.make(3.5, "trajectory", code_parts={"lint.long": 3.0, "lint.wide": 1.0, "bad": 0.0, "gone": 8.0})
    group.feedback("a", 1.5)
    assert group.parts() == {"code/lint.long": (3.0, 0.5), "code/lint.wide": (1.0, 0.5), "given": (1.5, 1.0)}


@pytest.mark.parametrize(
    ("source", "parts"), [("code", {}), ("group", {"given": (0.0, 1.0)}), ("judge", {"given": (0.0, 1.0)})]
)
def test_functions_alone_and_beside_a_groups_reward(group: Group, source: str, parts: dict[str, Any]) -> None:
    group.make(1.0, source, code_parts={"lint": 2.0})
    assert group.parts() == {"code/lint": (2.0, 0.5)} | parts


def test_what_a_judge_adds_is_a_part_with_the_rulers_weight(group: Group) -> None:
    group.make(2.5 + 0.25 * 0.8, "trajectory")
    group.feedback("a", 2.5, PARTS)
    learning = LEARNING.model_copy(update={"ruler": RulerSettings(weight=0.25)})
    assert group.parts(learning)["judge"] == (pytest.approx(0.8), 0.25)


@pytest.mark.parametrize(
    ("reward", "source"),
    [(0.0, "code"), (2.5, "failure"), (2.5, "steps"), (3.0, "trajectory")],
    ids=["veto", "failure", "steps", "other weights"],
)
def test_a_reward_that_its_parts_do_not_add_up_to_has_none(group: Group, reward: float, source: str) -> None:
    group.make(reward, source, other=1.0, code_parts={"lint": 2.0, "bad": 1.0})
    group.feedback("a", 2.5, PARTS)
    assert group.parts() == {}


def test_parts_are_read_only_where_they_count(group: Group) -> None:
    group.make(2.5, "trajectory")
    group.feedback("a", 2.5, PARTS)
    statements: list[str] = []
    event.listen(group.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert group.members(None)["a"].parts == {}
    assert not any("code_parts" in one or "feedback.parts" in one for one in statements)
    assert Settings().parts_learning_of("starter") is None
    assert Settings(trainer=RULES).parts_learning_of("starter") == RewardSettings()
    assert Settings(trainer=RULES.model_copy(update={"objective": "dpo"})).parts_learning_of("starter") is None


def give(group: Group, **numbers: dict[str, float]) -> None:
    for name, parts in numbers.items():
        group.feedback(name, 2.0, parts)


def test_a_group_of_equal_rewards_is_taken_where_parts_differ(group: Group) -> None:
    group.make(2.0, "trajectory", other=2.0)
    give(group, a={"right": 1.0, "short": 0.0}, b={"right": 0.0, "short": 2.0})
    with group.engine.connect() as connection:
        plan = dry_run(connection, "default", "starter", RULES, group.seed.now, LEARNING)
        blind = dry_run(connection, "default", "starter", RULES, group.seed.now)
    members = group.members()
    assert members["a"].parts["feedback/right"] == RewardPart(1.0, 2.0)
    shown = {one.trajectory_id: one.advantage for one in plan.trajectories}
    assert shown == pytest.approx({"a": 0.5**0.5, "b": -(0.5**0.5)}, rel=1e-3)
    assert blind.trajectories == ()


@pytest.mark.parametrize("other", [{"right": 1.0, "short": 0.0}, {"right": 1.0}])
def test_a_group_of_equal_rewards_and_parts_is_none_for_a_step(group: Group, other: dict[str, float]) -> None:
    group.make(2.0, "trajectory", other=2.0)
    give(group, a={"right": 1.0, "short": 0.0}, b=other)
    assert group.members() == {}
