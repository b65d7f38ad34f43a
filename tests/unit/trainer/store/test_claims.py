"""Steps asked for by hand, in the tables: taken once, told why not, and what was given up on the way."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from migrations import schema
from trainer.domain.claims import Claim
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings

RULES = TrainerSettings(groups_per_step=12, min_fresh_share=0.3)
ASKED_AT = datetime(2026, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
SFT = {"kind": "sft", "from": "best", "min_reward": None, "limit": 8}


class Tables:
    """A policy with groups that are too few for a step to be due."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.store = Store(engine, "default")

    def group(self, group_id: str, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0) -> None:
        self.seed.group(group_id, state="scored", size=2, rewarded=2, closed_at=datetime.now(UTC))
        for number, reward in enumerate(rewards):
            self.seed.trajectory(
                f"{group_id}-{number}", group_id, state="rewarded", reward=reward, first_version=version,
                last_version=version, why_not_trained="waiting_step",
            )  # fmt: skip

    def ask(self, **asked: Any) -> None:
        self.policy(step_asked={"kind": "grpo"} | asked, step_asked_at=ASKED_AT)

    def policy(self, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(schema.policies).values(**values))

    def claim(self) -> Claim | None:
        return self.store.claim("starter", RULES)

    def lease_ends(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(schema.steps).values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))

    def steps(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(schema.steps).order_by(schema.steps.c.number)))

    def still_asked(self) -> Any:
        row = self.seed.one(schema.policies, "starter")
        return row.step_asked, row.step_asked_at


@pytest.fixture
def tables(engine: Engine, seed: Any) -> Tables:
    return Tables(engine, seed)


@pytest.mark.parametrize("state", ["training", "recording"])
def test_a_step_asked_for_by_hand_is_taken_with_what_is_there(tables: Tables, state: str) -> None:
    tables.group("g")
    tables.policy(state=state)
    assert tables.claim() is None
    tables.ask()
    claim = tables.claim()
    assert claim is not None
    assert (claim.kind, claim.asked_at, claim.number) == ("grpo", ASKED_AT, 1)
    assert [member.trajectory_id for member in tables.store.members(claim)] == ["g-0", "g-1"]
    (step,) = tables.steps()
    assert (step.kind, step.asked_at, step.state, step.groups, step.discarded) == ("grpo", ASKED_AT, "claimed", 1, {})
    assert tables.still_asked() == (None, None)


def test_a_step_that_was_due_by_itself_was_not_asked_for(tables: Tables) -> None:
    for number in range(RULES.groups_per_step):
        tables.group(f"g{number}")
    claim = tables.claim()
    assert claim is not None and claim.asked_at is None
    assert [(step.kind, step.asked_at) for step in tables.steps()] == [("grpo", None)]


def test_asked_once_it_is_taken_once(tables: Tables) -> None:
    tables.group("g")
    tables.group("h")
    tables.ask()
    claims: list[Claim | None] = []
    workers = [threading.Thread(target=lambda: claims.append(tables.claim())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(claims) == 4 and sum(claim is not None for claim in claims) == 1
    assert len(tables.steps()) == 1


def test_a_paused_policy_takes_no_step_until_it_goes_on(tables: Tables) -> None:
    tables.group("g")
    tables.ask()
    tables.policy(state="paused")
    assert tables.claim() is None
    assert tables.still_asked() == ({"kind": "grpo"}, ASKED_AT)
    tables.policy(state="recording")
    assert tables.claim() is not None


def test_with_nothing_to_train_on_it_is_a_step_all_the_same_and_says_why(tables: Tables) -> None:
    tables.ask()
    assert tables.claim() is None
    (step,) = tables.steps()
    assert (step.state, step.asked_at, step.groups, step.version_out) == ("noop", ASKED_AT, 0, None)
    assert step.error == "requested by hand, but there is nothing to train on: no group is scored"
    assert step.ended_at is not None and step.lease_until is None
    assert tables.still_asked() == (None, None)
    tables.group("g")
    tables.ask()
    claim = tables.claim()
    assert claim is not None and claim.number == 2


def test_groups_that_agree_wait_on_where_a_step_found_nothing_else(tables: Tables) -> None:
    tables.group("u", rewards=(0.5, 0.5))
    tables.ask()
    assert tables.claim() is None
    (step,) = tables.steps()
    assert step.error.endswith("of 1 scored groups none can teach: 1 group_uniform")
    assert tables.seed.one(schema.groups, "u").state == "scored"


def test_a_step_tells_what_was_given_up_when_it_was_claimed(tables: Tables) -> None:
    for number, parent in ((1, 0), (2, 0)):
        tables.seed.insert(
            schema.policy_versions, project="default", id=f"starter@v{number}", policy="starter", version=number,
            parent=parent, state="retired", served=True, created_at=ASKED_AT,
        )  # fmt: skip
    tables.policy(live_version=2, next_version=3)
    tables.group("g", version=2)
    tables.group("u", rewards=(0.5, 0.5), version=2)
    tables.group("lost", version=1)
    tables.group("old", version=0)
    tables.ask()
    assert tables.store.claim("starter", RULES.model_copy(update={"max_staleness": 0})) is not None
    (step,) = tables.steps()
    assert step.discarded == {"off_lineage": 1, "stale": 1, "group_uniform": 1}
    group = tables.seed.one(schema.groups, "old")
    assert (group.state, group.reason) == ("discarded", "stale")
    assert tables.seed.one(schema.trajectories, "old-0").why_not_trained == "stale"


def test_a_step_that_only_gave_groups_up_tells_it_too(tables: Tables) -> None:
    tables.group("lost", version=7)
    tables.ask()
    assert tables.claim() is None
    (step,) = tables.steps()
    assert (step.state, step.discarded) == ("noop", {"off_lineage": 1})


def test_a_step_by_hand_whose_worker_went_silent_is_taken_over_though_the_policy_only_records(tables: Tables) -> None:
    tables.policy(state="recording")
    tables.group("g")
    tables.ask()
    lost = tables.claim()
    assert tables.claim() is None
    tables.lease_ends()
    again = tables.claim()
    assert lost is not None and again is not None
    assert (again.id, again.attempt, again.asked_at, again.kind) == (lost.id, 2, ASKED_AT, "grpo")


def test_a_step_that_was_due_by_itself_is_not_taken_over_while_the_policy_only_records(tables: Tables) -> None:
    for number in range(RULES.groups_per_step):
        tables.group(f"g{number}")
    assert tables.claim() is not None
    tables.policy(state="recording")
    tables.lease_ends()
    assert tables.claim() is None
    tables.ask()  # whoever asks for a step wants the one that was begun ended first
    again = tables.claim()
    assert again is not None and (again.number, again.attempt, again.asked_at) == (1, 2, None)
    assert tables.still_asked() == ({"kind": "grpo"}, ASKED_AT)


def test_a_supervised_step_takes_no_group_and_knows_what_to_imitate(tables: Tables) -> None:
    tables.group("g")
    tables.ask(**SFT)
    claim = tables.claim()
    assert claim is not None and (claim.kind, claim.asked_at) == ("sft", ASKED_AT)
    (step,) = tables.steps()
    assert (step.kind, step.state, step.groups) == ("sft", "claimed", 0)
    assert step.imitates == {"from": "best", "min_reward": None, "limit": 8}
    assert tables.seed.one(schema.groups, "g").state == "scored"
    assert tables.still_asked() == (None, None)
    tables.lease_ends()
    again = tables.claim()
    assert again is not None and (again.kind, again.attempt) == ("sft", 2)
