"""What a sweep breaks at keeps nobody else waiting: it is set aside with the reason, and looked at no more."""

from datetime import timedelta

import pytest
from sqlalchemy.exc import InterfaceError, OperationalError

from judge.settlement.batch_runner import BATCH, Work, drain
from judge.settlement.sweep import sweep
from migrations import schema
from whetstone.config.settings import GroupSettings

GROUPS = GroupSettings(target_size=2, prompt_window_s=0)
FAULT = "a fault of Whetstone's, see judge.log: "


def test_feedback_that_cannot_be_applied_fails_and_the_rest_is_applied(engine, seed, logged):
    for name in "abc":
        seed.trajectory(name)
    seed.feedback("a", 1.0)
    broken = seed.feedback("b", source="parts", parts={"tone": {"no": "number"}})
    seed.feedback("c", 0.5)
    sweep(engine, GROUPS, seed.now)
    row = seed.one(schema.feedback, broken)
    assert (row.state, row.reason) == ("failed", f"{FAULT}TypeError")
    rewards = {name: seed.one(schema.trajectories, name).reward for name in "abc"}
    assert rewards == {"a": 1.0, "b": None, "c": 0.5}
    assert any(line["message"] == f"set aside: {broken} of default" for line in logged())
    again = sweep(engine, GROUPS, seed.now + timedelta(seconds=1))
    assert again.feedback == 0


def test_a_group_that_cannot_be_assessed_is_discarded_and_the_rest_is_scored(engine, seed):
    for group, reward in (("broken", 1e300), ("right", 1.0)):
        seed.group(group, due_at=seed.now)
        for name, own in (("a", 0.0), ("b", reward)):
            seed.trajectory(
                f"{group}-{name}", group, state="rewarded", reward=own, reward_source="trajectory", placed_at=seed.now,
                ended_at=seed.now,
            )  # fmt: skip
    sweep(engine, GROUPS, seed.now)
    broken = seed.one(schema.groups, "broken")
    assert (broken.state, broken.reason) == ("discarded", f"{FAULT}OverflowError")
    assert seed.one(schema.trajectories, "broken-a").why_not_trained == "fault"
    assert seed.one(schema.groups, "right").state == "scored"
    assert sweep(engine, GROUPS, seed.now + timedelta(seconds=1)).groups == 0


def test_more_than_a_batch_of_what_breaks_keeps_nobody_waiting_for_long(engine, seed):
    seed.trajectory("t")
    for _ in range(BATCH + 1):
        seed.feedback("t", source="parts", parts={"tone": {"no": "number"}})
    last = seed.feedback("t", 1.0, created_at=seed.now + timedelta(seconds=1))
    for second in range(3):
        sweep(engine, GROUPS, seed.now + timedelta(seconds=second))
    assert seed.one(schema.feedback, last).state == "applied"


@pytest.mark.parametrize(
    "error", [OperationalError("s", None, Exception("away")), InterfaceError("s", None, Exception())]
)
def test_while_the_database_is_away_nothing_is_set_aside(engine, error):
    def do(_connection, _found):
        raise error

    left = []
    work = Work(lambda *_: {"default": ["one"]}, do, lambda *_: {"default": ["one"]}, lambda *one: left.append(one))
    with pytest.raises(type(error)):
        drain(engine, work)
    assert left == []
