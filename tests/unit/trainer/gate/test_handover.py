"""Handovers in the tables: begun by the settings, moved by rewards."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from migrations import schema
from trainer.gate.handover import HandoverController
from trainer.store.handover import HandoverTables
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.registry.handover import read_handover, read_saved
from whetstone.registry.projects import Store

TEACHER = "starter-teacher"
UPSTREAMS = {"other": {"url": "http://other/v1", "models": {TEACHER: "gpt", "second": "gpt"}}}
HANDOVER = {
    "teacher": TEACHER,
    "shares": [0.1, 0.5, 0.9],
    "usd_per_million_prompt_tokens": 2.0,
    "usd_per_million_completion_tokens": 10.0,
}


def settings_with(handover: dict[str, Any] | None) -> Settings:
    learning = {} if handover is None else {"starter": {"handover": handover}}
    return load(environment={}, upstreams=UPSTREAMS, learning=learning)


class Handing:
    """A policy, its teacher, and the worker that looks at their rewards."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.now = datetime.now(UTC)
        self.number = 0
        self.settings = settings_with(HANDOVER)
        self.prepare()

    def prepare(self) -> None:
        """What each start does."""
        Store(self.engine).prepare(self.settings)

    def rewards(self, policy: str, count: int, won: int, **values: Any) -> None:
        """So many attempts of a policy, the first of which won."""
        self.now += timedelta(seconds=1)
        for place in range(count):
            self.number += 1
            name = f"{policy}-{self.number}"
            self.seed.trajectory(
                name, turns=0, policy=policy, state="rewarded", reward=float(place < won), created_at=self.now, **values
            )
            self.seed.completion(name, 0, policy=policy, created_at=self.now)

    def look(self) -> None:
        self.now += timedelta(seconds=1)
        tables = HandoverTables(self.engine, "default")
        HandoverController(tables, self.settings, rest_s=0).go_on("starter", self.now)

    @property
    def state(self) -> Any:
        with self.engine.connect() as connection:
            return read_handover(connection, "default", "starter")

    @property
    def decisions(self) -> list[str]:
        g = schema.gate_results.c
        query = select(g.decision).where(g.test == "handover").order_by(g.created_at)
        with self.engine.connect() as connection:
            return list(connection.execute(query).scalars())


@pytest.fixture
def handing(engine: Engine, seed: Any) -> Handing:
    return Handing(engine, seed)


def test_it_begins_with_the_first_share_once(handing: Handing) -> None:
    handing.prepare()
    assert (handing.state.teacher, handing.state.share) == (TEACHER, 0.1)
    assert handing.decisions == ["begin"]


def test_a_policy_as_good_as_its_teacher_gets_the_next_share(handing: Handing) -> None:
    handing.rewards("starter", 49, 49)
    handing.rewards(TEACHER, 60, 30)
    handing.look()
    assert handing.state.share == 0.1
    handing.rewards("starter", 1, 1)
    handing.look()
    assert handing.state.share == 0.5
    # The rewards before count no more.
    handing.look()
    assert handing.decisions == ["begin", "raise"]


def test_a_bad_policy_is_sent_back(handing: Handing) -> None:
    for own, teacher in ((50, 20), (45, 20), (5, 40)):
        handing.rewards("starter", 50, own, first_version=3, last_version=3)
        handing.rewards(TEACHER, 50, teacher)
        handing.look()
    assert handing.decisions == ["begin", "raise", "raise", "lower"]
    assert handing.state.share == 0.1


def test_a_look_without_a_decision_is_taken_once(handing: Handing) -> None:
    handing.rewards("starter", 50, 25)
    handing.rewards(TEACHER, 50, 25)
    for _ in range(3):
        handing.look()
    assert handing.decisions == ["begin", "testing"]


def test_what_counts_are_groups_of_the_train_split_that_apps_requested(handing: Handing) -> None:
    handing.rewards("starter", 60, 60, split="eval")
    handing.seed.group("g")
    handing.rewards("starter", 60, 60, group_id="g")
    handing.rewards(TEACHER, 60, 10)
    handing.look()
    assert handing.decisions == ["begin"]


def test_the_share_stays_over_a_restart_and_goes_with_the_settings(handing: Handing) -> None:
    handing.rewards("starter", 50, 50)
    handing.rewards(TEACHER, 50, 10)
    handing.look()
    handing.prepare()
    assert handing.state.share == 0.5
    handing.settings = settings_with(HANDOVER | {"shares": [0.2, 0.4, 0.8]})
    handing.prepare()
    assert handing.state.share == 0.4
    handing.settings = settings_with(HANDOVER | {"teacher": "second"})
    handing.prepare()
    assert (handing.state.teacher, handing.state.share) == ("second", 0.1)
    handing.settings = settings_with(None)
    handing.prepare()
    assert handing.state is None


def test_a_policy_without_a_handover_is_left_alone(handing: Handing) -> None:
    handing.settings = settings_with(None)
    handing.rewards("starter", 50, 50)
    handing.rewards(TEACHER, 50, 10)
    handing.look()
    assert handing.decisions == ["begin"]


def test_the_saved_cost_is_what_the_teacher_would_have_taken(handing: Handing) -> None:
    handing.rewards("starter", 10, 5)
    handing.rewards(TEACHER, 7, 5)
    with handing.engine.connect() as connection:
        saved = read_saved(connection, "default", "starter", handing.settings.upstream_prices["default", TEACHER])
        assert read_saved(connection, "default", "starter", None).usd is None
        row = connection.execute(text("SELECT * FROM admin_policies WHERE policy = 'starter'")).one()
    # Each answer of the fixture reads 2 tokens and writes 2.
    assert (saved.answers, saved.prompt_tokens, saved.completion_tokens) == (10, 20, 20)
    assert saved.usd == pytest.approx((20 * 2 + 20 * 10) / 1e6)
    assert (row.handover_teacher, row.handover_share) == (TEACHER, 0.1)


@pytest.mark.parametrize(
    ("handover", "why"),
    [
        ({"teacher": "starter"}, "'starter' is no model of another server of this project"),
        ({"teacher": "none"}, "there are: starter-teacher, second"),
        ({"teacher": TEACHER, "shares": []}, "at least 1 item"),
        ({"teacher": TEACHER, "shares": [0.0, 0.5]}, "greater than 0"),
    ],
)
def test_wrong_settings_are_refused(handover: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        settings_with(handover)


def test_two_policies_share_no_teacher() -> None:
    with pytest.raises(SettingsError, match="another policy's teacher too"):
        load(
            environment={},
            upstreams=UPSTREAMS,
            policies=["other-policy"],
            learning={name: {"handover": {"teacher": TEACHER}} for name in ("starter", "other-policy")},
        )
