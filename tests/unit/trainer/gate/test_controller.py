"""Candidates in their tests and live versions that are watched: each move in the tables, at times of the test's."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from migrations import schema
from trainer.domain.claims import Claim, Probe
from trainer.gate.controller import GateController, heldout_verdict
from trainer.store.gate_tests import GateTables
from trainer.store.heldout import Pair
from trainer.store.unit_of_work import Store
from whetstone.config.gate import GateSettings
from whetstone.config.settings import Settings
from whetstone.config.trainer import TrainerSettings
from whetstone.registry.versions import make_live, roll_back

RULES = TrainerSettings(groups_per_step=1, min_fresh_share=0)
GATE = GateSettings(heldout_prompts=16, heldout_minimum=8, smallest_loss=0.2)
MEDIA = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


class Gate:
    """A policy whose step has passed the probe, and what looks after its candidate."""

    def __init__(self, engine: Engine, seed: Any) -> None:
        self.engine, self.seed = engine, seed
        self.store = Store(engine, "default")
        self.tables = GateTables(engine, "default")
        self.now = datetime.now(UTC)
        self.gate = GATE

    def tests(self, *tests: str, **values: Any) -> None:
        self.gate = GATE.model_copy(update={"tests": tests, **values})

    def claim(self) -> Claim | None:
        return self.store.claim("starter", RULES)

    def step(self, group: str = "g", version: int = 0) -> Claim:
        """A step whose candidate waits for its tests."""
        self.seed.group(group, state="scored", size=2, rewarded=2, closed_at=self.now)
        for reward in (0.0, 1.0):
            self.seed.trajectory(
                f"{group}-{reward}", group, state="rewarded", reward=reward, first_version=version,
                last_version=version,
            )  # fmt: skip
        claim = self.claim()
        assert claim is not None
        self.store.note_advantages(claim, {f"{group}-0.0": -0.5, f"{group}-1.0": 0.5}, {})
        self.store.trained(claim, {}, Path("/adapters") / claim.name_out, "hash")
        self.store.loaded(claim)
        self.store.wait_for_tests(claim, {"seconds": 1.0}, Probe(1e-5, 32, {"k3": 1e-5}))
        return claim

    def go_on(self, after_s: float = 0.0) -> None:
        """One look of a worker."""
        settings = Settings(gate=self.gate, trainer=RULES)
        GateController(self.tables, settings, rest_s=0).go_on("starter", self.now + timedelta(seconds=after_s))

    def evals(self, count: int, **values: Any) -> None:
        """Logged prompts of the eval split."""
        for number in range(count):
            name = f"eval{number}"
            at = self.now - timedelta(seconds=number)
            self.seed.trajectory(
                name, split="eval", state="rewarded", prompt_hash=f"hash{number}", created_at=at, **values
            )

    def answer(self, reward_of: Callable[[int], float | None]) -> None:
        """What the proxy draws and functions say: a reward of each version's answers."""
        for row in self.rows(schema.evaluations):
            group = {"formed_by": "evaluation", "state": "discarded"}
            if row.version == 0:
                self.seed.group(row.group_id, **group)
            reward = reward_of(row.version)
            self.seed.trajectory(
                row.trajectory_id, row.group_id, split="eval", first_version=row.version, reward=reward,
                state="ended" if reward is None else "rewarded",
            )  # fmt: skip
        self.write(schema.evaluations, drawn_at=self.now)

    def live(self, version: int, rewards: list[float], since_s: float = 1.0) -> None:
        """Trajectories that a version has begun."""
        for number, reward in enumerate(rewards):
            at = self.now + timedelta(seconds=since_s + number / 1000)
            name = f"{version}-{since_s}-{number}"
            self.seed.trajectory(
                name, state="rewarded", reward=reward, first_version=version, last_version=version, created_at=at
            )

    def write(self, table: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).values(**values))

    def rows(self, table: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(table)))

    def decisions(self) -> list[tuple[str, str]]:
        with self.engine.connect() as connection:
            r = schema.gate_results.c
            query = select(r.test, r.decision).where(r.test != "probe").order_by(r.created_at, r.id)
            return [(row.test, row.decision) for row in connection.execute(query)]

    def last(self) -> Any:
        r = schema.gate_results.c
        tested = select(schema.gate_results).where(r.test != "probe")
        with self.engine.connect() as connection:
            return connection.execute(tested.order_by(r.created_at.desc(), r.id.desc())).first()

    def version(self, number: int) -> Any:
        return self.seed.one(schema.policy_versions, f"starter@v{number}")

    def state(self, number: int = 1) -> str:
        return str(self.seed.one(schema.steps, f"starter#{number}").state)

    @property
    def live_version(self) -> int:
        return int(self.seed.one(schema.policies, "starter").live_version)


@pytest.fixture
def gate(engine: Engine, seed: Any) -> Gate:
    return Gate(engine, seed)


def test_while_a_candidate_is_tested_no_step_begins_and_nobody_takes_its_own_over(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    step = gate.seed.one(schema.steps, "starter#1")
    assert (step.state, step.ended_at, step.lease_until, step.seconds) == ("waiting_gate", None, None, 1.0)
    assert gate.live_version == 0 and gate.version(1).served
    gate.seed.group("h", state="scored", closed_at=gate.now)
    for name, reward in (("a", 0.0), ("b", 1.0)):
        gate.seed.trajectory(name, "h", state="rewarded", reward=reward)
    assert gate.claim() is None
    gate.write(schema.policies, step_asked={"kind": "grpo"}, step_asked_at=gate.now)
    assert gate.claim() is None
    assert gate.seed.one(schema.policies, "starter").step_asked is not None  # it is taken when the tests are over
    assert len(gate.rows(schema.steps)) == 1


def test_held_out_prompts_are_answered_by_both_versions_and_a_worse_candidate_is_rejected(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    asked = gate.rows(schema.evaluations)
    assert len(asked) == 24 and len({row.group_id for row in asked}) == 12
    assert {row.version for row in asked} == {0, 1} and {row.candidate for row in asked} == {1}
    assert {row.source_id for row in asked} == {f"eval{number}-0" for number in range(12)}
    assert gate.version(1).tested_by == "heldout"
    gate.go_on()
    assert gate.state() == "waiting_gate"  # nobody has answered yet
    gate.answer(lambda version: 0.2 if version else 0.9)
    gate.go_on()
    assert (gate.live_version, gate.state()) == (0, "rejected")
    version = gate.version(1)
    assert (version.state, version.served, version.tested_by) == ("rejected", False, None)
    assert "below its parent on 12 held-out prompts" in version.reason
    assert version.heldout_mean == pytest.approx(0.2) and version.heldout_count == 12
    told = gate.last()
    assert (told.test, told.decision, told.against) == ("heldout", "reject", 0)
    assert told.figures["difference"] == pytest.approx(-0.7)
    assert {row.state for row in gate.rows(schema.groups) if row.formed_by == "header"} == {"trained"}  # once is once


def test_one_that_is_as_good_goes_live_and_the_next_step_may_begin(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.answer(lambda _version: 0.5)
    gate.go_on()
    assert gate.decisions() == [("heldout", "pass")]
    assert (gate.live_version, gate.state()) == (1, "promoted")
    assert gate.version(1).heldout_mean == gate.version(0).heldout_mean == 0.5
    assert gate.step("h", version=1).version_in == 1


def test_a_parent_that_was_tested_itself_keeps_its_mean(gate: Gate) -> None:
    gate.write(schema.policy_versions, heldout_mean=0.9, heldout_count=20)
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.answer(lambda _version: 0.5)
    gate.go_on()
    assert (gate.version(1).heldout_mean, gate.version(1).heldout_count) == (0.5, 12)
    assert (gate.version(0).heldout_mean, gate.version(0).heldout_count) == (0.9, 20)


def test_tests_follow_one_another_in_the_order_of_the_settings(gate: Gate) -> None:
    gate.tests("canary", "heldout", canary_share=0.3)
    gate.step()
    gate.evals(12)
    gate.go_on()
    assert (gate.version(1).tested_by, gate.version(1).canary_share) == ("canary", 0.3)
    for version in (0, 1):
        gate.live(version, [0.0, 1.0] * 400)
    gate.go_on(after_s=10)
    gate.go_on(after_s=20)
    assert (gate.version(1).tested_by, gate.version(1).canary_share) == ("heldout", None)
    gate.answer(lambda _version: 0.5)
    for _ in range(2):
        gate.go_on(after_s=30)
    assert gate.decisions()[-2:] == [("canary", "pass"), ("heldout", "pass")]
    assert gate.live_version == 1


def test_a_candidate_that_does_worse_on_its_share_of_the_traffic_is_rejected(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    gate.live(1, [0.0] * 40)
    gate.live(0, [1.0, 0.9] * 40)
    gate.live(0, [-1.0] * 40, since_s=-100)  # before the test
    gate.go_on(after_s=10)
    assert (gate.live_version, gate.state(), gate.version(1).state) == (0, "rejected", "rejected")
    told = gate.last()
    assert (told.test, told.decision) == ("canary", "reject")
    assert (told.figures["candidate_count"], told.figures["parent_count"]) == (40, 80)


def test_a_look_that_decides_nothing_is_written_down_once(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    for version in (0, 1):
        gate.live(version, [0.0, 1.0] * 40)
    for _ in range(3):
        gate.go_on(after_s=10)
    assert gate.decisions() == [("canary", "testing")]
    assert gate.last().figures["look"] >= 1 and gate.state() == "waiting_gate"


def test_rewards_that_no_app_asked_for_or_that_are_not_its_own_tell_nothing(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    gate.live(0, [1.0] * 40)
    gate.live(1, [0.0] * 40)
    with gate.engine.begin() as connection:
        c = schema.completions.c
        shadows = update(schema.completions).where(c.trajectory_id.like("1-%")).values(threaded_by="shadow")
        connection.execute(shadows)
    gate.go_on(after_s=10)
    assert gate.state() == "waiting_gate"


def test_attempts_at_one_prompt_count_as_one_and_the_canary_goes_by_groups(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    at = gate.now + timedelta(seconds=1)
    for prompt in range(5):
        gate.seed.group(f"prompt{prompt}", state="scored", closed_at=at)
        for version in (0, 1):
            for attempt in range(8):
                reward = float(attempt < prompt)
                gate.seed.trajectory(
                    f"{prompt}-{version}-{attempt}", f"prompt{prompt}", state="rewarded", reward=reward,
                    first_version=version, last_version=version, created_at=at + timedelta(seconds=prompt),
                )  # fmt: skip
    told = gate.tables.moments("starter", 1, gate.now)
    assert (told.count, told.mean) == (5, pytest.approx(0.25))  # 0/8, 1/8, ..., 4/8
    assert told.variance == pytest.approx(2 / 64)
    before = gate.tables.rewards("starter", 0, at + timedelta(minutes=1), 100)
    assert before[:5] == [0.5, 0.375, 0.25, 0.125, 0.0]
    assert gate.tables.rewards("starter", 0, at + timedelta(minutes=1), 8) == [0.5]
    gate.go_on(after_s=10)
    assert gate.decisions() == []  # forty rewards of either version, of five groups


@pytest.mark.parametrize("test", ["heldout", "canary"])
def test_what_is_not_known_by_the_deadline_does_not_go_live(gate: Gate, test: str) -> None:
    gate.tests(test, deadline_s=100)
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.go_on(after_s=99)
    assert gate.state() == "waiting_gate"
    gate.go_on(after_s=100)
    assert (gate.live_version, gate.state()) == (0, "rejected")
    assert {row.error for row in gate.rows(schema.evaluations)} <= {"the test was over"}


def test_too_few_held_out_prompts_reject_and_say_how_to_send_some(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(7)
    gate.go_on()
    assert gate.state() == "rejected"
    assert "X-Split: eval" in gate.version(1).reason and gate.last().figures == {"prompts": 7}


def test_only_chats_in_text_that_an_app_asked_are_held_out_prompts_the_newest_of_each_first(gate: Gate) -> None:
    def prompt(name: str, *, ago_s: float, prompt_hash: str, **values: Any) -> None:
        row = {"split": "eval", "created_at": gate.now - timedelta(seconds=ago_s), "prompt_hash": prompt_hash}
        gate.seed.trajectory(name, turns=0, **(row | values))

    for name, ago_s, prompt_hash in (("old", 9, "a"), ("new", 3, "a"), ("other", 5, "b"), ("third", 7, "c")):
        prompt(name, ago_s=ago_s, prompt_hash=prompt_hash)
        gate.seed.completion(name, 0)
    prompt("train", ago_s=1, prompt_hash="d", split="train")
    gate.seed.completion("train", 0)
    odd: dict[str, dict[str, Any]] = {
        "image": {"new_messages": MEDIA}, "text": {"endpoint": "completions"}, "failed": {"status": "error"},
        "drawn": {"threaded_by": "evaluation"},
    }  # fmt: skip
    for name, values in odd.items():
        prompt(name, ago_s=0, prompt_hash=name)
        gate.seed.completion(name, 0, **values)
    assert gate.tables.prompts("starter", 16) == ["new-0", "other-0", "third-0"]
    assert gate.tables.prompts("starter", 2) == ["new-0", "other-0"]


def test_answers_without_a_reward_that_will_never_have_one_end_the_test_and_say_who_gives_them(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.answer(lambda _version: None)
    gate.go_on()
    assert gate.state() == "rejected" and "reward functions or judges" in gate.version(1).reason


def test_answers_whose_functions_or_judges_are_not_done_are_waited_for(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.answer(lambda _version: 0.5)
    gate.write(schema.trajectories, code_due_at=gate.now)
    gate.go_on()
    gate.write(schema.trajectories, code_due_at=None)
    with gate.engine.begin() as connection:
        g = schema.groups.c
        connection.execute(update(schema.groups).where(g.formed_by == "evaluation").values(state="closed"))
    gate.go_on()
    assert gate.decisions() == []
    with gate.engine.begin() as connection:
        connection.execute(update(schema.groups).where(g.formed_by == "evaluation").values(state="discarded"))
    gate.go_on()
    assert gate.decisions() == [("heldout", "pass")]


def rolled_back(gate: Gate) -> None:
    with gate.engine.begin() as connection:
        roll_back(connection, "default", "starter", None, "by hand", 2, gate.now)


def test_a_candidate_that_was_rolled_back_with_its_parent_ends_its_step(gate: Gate) -> None:
    gate.tests()
    gate.step()
    gate.go_on()
    assert gate.live_version == 1
    gate.tests("canary")
    gate.step("h", version=1)
    gate.go_on()
    rolled_back(gate)
    gate.go_on()
    assert (gate.state(2), gate.version(2).state, gate.live_version) == ("rejected", "rejected", 0)
    assert "rolled back" in gate.seed.one(schema.steps, "starter#2").error
    assert gate.step("i").version_in == 0


def test_a_candidate_whose_parent_no_longer_answers_is_rejected_with_that_reason(gate: Gate) -> None:
    gate.tests()
    gate.step()
    gate.seed.insert(
        schema.policy_versions, project="default", id="starter@v9", policy="starter", version=9, parent=0,
        state="live", served=True, created_at=gate.now, promoted_at=gate.now, adapter_path="/adapters/9",
    )  # fmt: skip
    gate.write(schema.policies, live_version=9)
    gate.go_on()
    assert (gate.live_version, gate.state(), gate.version(1).state) == (9, "rejected", "rejected")
    assert "version 9 has gone live meanwhile" in gate.version(1).reason


def test_a_candidate_that_is_promoted_by_hand_ends_its_step_as_promoted(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    with gate.engine.begin() as connection:
        make_live(connection, "default", "starter", 1, 2, gate.now)
    gate.go_on()
    assert (gate.live_version, gate.state(), gate.version(1).state) == (1, "promoted", "live")


def test_a_candidate_that_was_promoted_and_replaced_by_hand_does_not_come_back(gate: Gate) -> None:
    gate.tests("canary")
    gate.step()
    gate.go_on()
    for version in (1, 0):
        with gate.engine.begin() as connection:
            make_live(connection, "default", "starter", version, 2, gate.now)
    gate.tests()
    gate.go_on()
    assert (gate.live_version, gate.state(), gate.version(1).state) == (0, "promoted", "retired")


def test_a_test_that_the_settings_no_longer_ask_for_is_left(gate: Gate) -> None:
    gate.tests("heldout")
    gate.step()
    gate.evals(12)
    gate.go_on()
    gate.tests()
    gate.go_on()
    assert (gate.live_version, gate.version(1).tested_by) == (1, None)
    assert {row.error for row in gate.rows(schema.evaluations)} == {"the test was over"}


def promoted(gate: Gate, parents: list[float]) -> None:
    """Version 1 is live; what its parent got before."""
    gate.tests()
    gate.step()
    gate.live(0, parents, since_s=-1000)
    gate.go_on()
    assert gate.live_version == 1


def test_a_live_version_that_does_worse_than_its_parent_is_rolled_back_by_itself(gate: Gate) -> None:
    promoted(gate, [0.9, 1.0] * 40)
    gate.live(1, [0.0, 0.1] * 20)
    gate.go_on(after_s=10)
    assert (gate.live_version, gate.version(1).state, gate.version(0).state) == (0, "rejected", "live")
    told = gate.last()
    assert (told.test, told.decision, told.version, told.against) == ("watch", "rollback", 1, 0)
    assert told.figures["difference"] == pytest.approx(-0.9)
    assert told.figures["candidate_count"] == 40
    assert gate.version(1).watched_at is not None


def test_a_rollback_goes_back_one_version_and_no_further_by_itself(gate: Gate) -> None:
    promoted(gate, [0.9, 1.0] * 40)
    gate.now += timedelta(minutes=1)
    gate.step("h", version=1)
    gate.go_on()
    assert gate.live_version == 2
    gate.live(1, [0.5, 0.6] * 40, since_s=-10)
    gate.live(2, [0.0, 0.1] * 20)
    gate.go_on(after_s=10)
    gate.live(1, [0.3, 0.4] * 40, since_s=20)  # below what version 0 got, in another hour
    gate.go_on(after_s=30)
    assert (gate.live_version, gate.decisions()) == (1, [("watch", "rollback")])


def test_one_that_does_as_well_is_watched_until_the_last_look(gate: Gate) -> None:
    promoted(gate, [0.0, 1.0] * 500)
    gate.live(1, [0.0, 1.0] * 40)
    gate.go_on(after_s=10)
    assert gate.version(1).watched_at is None and gate.decisions() == [("watch", "testing")]
    gate.live(1, [0.0, 1.0] * 400, since_s=5)
    gate.go_on(after_s=20)
    assert gate.version(1).watched_at is not None and gate.decisions()[-1] == ("watch", "pass")
    gate.live(1, [-9.0] * 100, since_s=10)
    gate.go_on(after_s=30)
    assert gate.live_version == 1


def test_nothing_is_rolled_back_where_the_settings_forbid_it(gate: Gate) -> None:
    promoted(gate, [1.0] * 80)
    gate.tests(rollback=False)
    gate.live(1, [0.0, 0.1] * 20)
    gate.go_on(after_s=10)
    assert gate.live_version == 1


def test_a_parent_of_which_too_little_is_known_ends_the_watch_after_the_deadline(gate: Gate) -> None:
    promoted(gate, [1.0] * 5)
    gate.live(1, [0.0] * 40)
    gate.go_on(after_s=10)
    assert gate.version(1).watched_at is None
    gate.go_on(after_s=GATE.deadline_s + 10)
    assert gate.version(1).watched_at is not None
    # Five, and the group that the step was taken with.
    assert "it has 40 groups with rewards, its parent 6" in gate.last().reason


def test_a_live_version_that_nobody_judges_is_not_looked_at_for_ever(gate: Gate) -> None:
    promoted(gate, [1.0] * 80)
    gate.live(1, [0.0] * 3)
    gate.go_on(after_s=10)
    assert gate.version(1).watched_at is None
    gate.go_on(after_s=GATE.deadline_s + 10)
    assert gate.version(1).watched_at is not None and gate.live_version == 1
    assert "too few rewards in" in gate.last().reason


def test_the_live_version_is_watched_while_its_candidate_is_tested(gate: Gate) -> None:
    promoted(gate, [0.9, 1.0] * 40)
    gate.tests("heldout")
    gate.step("h", version=1)
    gate.evals(12)
    gate.live(1, [0.0, 0.1] * 20)
    gate.go_on(after_s=10)
    assert (gate.live_version, gate.version(1).state, gate.version(2).state) == (0, "rejected", "rejected")
    gate.go_on(after_s=20)
    assert gate.state(2) == "rejected"


def test_held_out_answers_that_are_there_at_the_deadline_decide(gate: Gate) -> None:
    pairs = [Pair(0.0, 1.0, False)] * 10 + [Pair(None, None, True)] * 2
    assert heldout_verdict(pairs, GATE, late=False).decision == "testing"
    assert heldout_verdict(pairs, GATE, late=True).decision == "reject"
    assert heldout_verdict([*pairs, Pair(None, 1.0, False)], GATE, late=True).figures["prompts"] == 10
