"""A step's life in the tables: claimed, taken over, promoted, rejected, without a version."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, update

from migrations import schema
from trainer.domain.claims import Claim, Probe
from trainer.domain.constraints import Constraints
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Row
from trainer.errors import LeaseLost
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings
from whetstone.registry.projects import Store as CommandLine

RULES = TrainerSettings(groups_per_step=1, max_groups_per_step=4, min_fresh_share=0.3)
PROBE = Probe(0.0, 32)
FIGURES = {"loss": 0.1, "reward_mean": 0.5}


@pytest.fixture
def store(engine: Engine, seed: Any) -> Store:
    scored_group(seed, "g")
    return Store(engine, "default")


def scored_group(seed: Any, group_id: str, version: int = 0) -> None:
    seed.group(group_id, state="scored", size=2, rewarded=2, closed_at=datetime.now(UTC))
    for reward in (0.0, 1.0):
        seed.trajectory(
            f"{group_id}-{reward}", group_id, turns=2, state="rewarded", reward=reward, first_version=version,
            last_version=version, why_not_trained="waiting_step",
        )  # fmt: skip
        seed.feedback(f"{group_id}-{reward}", reward, state="applied", trajectory_id=f"{group_id}-{reward}")


def claim_of(store: Store) -> Claim:
    claim = store.claim("starter", RULES)
    assert claim is not None
    return claim


def rows(engine: Engine, table: Any) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(table)))


def measured(decided: dict[str, int], *left_out: str, disagreements: int = 0) -> MeasuredRows:
    """What constraints decided in a step with one row, of which six tokens are left."""
    left = Row("left", tuple(range(8)), (False,) * 2 + (True,) * 6, (0.0,) * 8, (0,) * 8, (1.0,) * 8, (0.5,) * 8)
    return MeasuredRows((left,), decided, frozenset(left_out), disagreements=disagreements)


def teach(store: Store, claim: Claim) -> None:
    store.note_advantages(claim, {"g-0.0": -0.5, "g-1.0": 0.5}, {})


def test_a_claim_freezes_its_groups_trajectories_and_rewards(store: Store, engine: Engine) -> None:
    claim = claim_of(store)
    assert (claim.number, claim.version_in, claim.version_out, claim.attempt) == (1, 0, 1, 1)
    assert {row.state for row in rows(engine, schema.groups)} == {"claimed"}
    assert {row.state for row in rows(engine, schema.trajectories)} == {"claimed"}
    taken = {row.trajectory_id: (row.reward, row.staleness) for row in rows(engine, schema.step_trajectories)}
    assert taken == {"g-0.0": (0.0, 0), "g-1.0": (1.0, 0)}


def test_a_step_that_somebody_has_is_not_taken_twice(store: Store) -> None:
    claim_of(store)
    assert store.claim("starter", RULES) is None


def test_a_policy_that_only_records_takes_no_step(store: Store, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(update(schema.policies).values(state="recording"))
    assert store.claim("starter", RULES) is None


def test_members_come_with_whole_prompts_in_turn_order(store: Store) -> None:
    members = store.members(claim_of(store))
    assert [member.trajectory_id for member in members] == ["g-0.0", "g-1.0"]
    first, second = members[0].completions
    assert (first.prompt_ids, first.token_ids) == ((1, 2), (3, 4))
    assert (second.prompt_ids, second.token_ids) == ((1, 2, 3, 4, 11, 12), (13, 14))
    assert second.logprobs == (-0.5, -0.25)


def test_a_completion_that_cannot_be_trained_on_still_carries_those_that_follow_it(
    store: Store, engine: Engine
) -> None:
    with engine.begin() as connection:
        bent = update(schema.completions).where(schema.completions.c.turn == 0)
        connection.execute(bent.values(why_not_trained="sampling_bent: top_p"))
    (spoken,) = store.members(claim_of(store))[0].completions
    assert spoken.prompt_ids == (1, 2, 3, 4, 11, 12)


def test_a_silent_workers_step_is_taken_over_with_the_same_trajectories(store: Store, engine: Engine) -> None:
    lost = claim_of(store)
    store.trained(lost, FIGURES, Path("/adapters/starter@v1"), "hash")
    past = datetime.now(UTC) - timedelta(seconds=1)
    with engine.begin() as connection:
        connection.execute(update(schema.steps).values(lease_until=past))
    again = claim_of(store)
    assert (again.id, again.attempt, again.version_out) == (lost.id, 2, 2)
    assert [m.trajectory_id for m in store.members(again)] == [m.trajectory_id for m in store.members(lost)]
    versions = {row.version: row.state for row in rows(engine, schema.policy_versions)}
    assert versions == {0: "live", 1: "rejected"}


def test_a_step_that_is_never_ended_is_given_up(store: Store, engine: Engine, seed: Any) -> None:
    for _ in range(RULES.max_attempts):
        claim_of(store)
        with engine.begin() as connection:
            connection.execute(update(schema.steps).values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))
    assert store.claim("starter", RULES) is None
    step = seed.one(schema.steps, "starter#1")
    assert step.state == "failed" and "given up after 5 attempts" in step.error
    assert {row.why_not_trained for row in rows(engine, schema.trajectories)} == {"step_failed"}


@pytest.mark.parametrize("write", ["renew", "trained", "loaded", "promote", "reject", "end", "note", "decided"])
def test_who_lost_the_lease_writes_nothing_more(store: Store, engine: Engine, write: str) -> None:
    lost = claim_of(store)
    with engine.begin() as connection:
        connection.execute(update(schema.steps).values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))
    claim_of(store)
    before = [rows(engine, table) for table in schema.metadata.sorted_tables]
    writes = {
        "renew": lambda: store.renew(lost, 10),
        "trained": lambda: store.trained(lost, FIGURES, Path("/a"), "hash"),
        "loaded": lambda: store.loaded(lost),
        "promote": lambda: store.promote(lost, FIGURES, PROBE, 2),
        "reject": lambda: store.reject(lost, "no", PROBE, {}),
        "end": lambda: store.end_without_version(lost, "noop", "nothing", {}),
        "note": lambda: teach(store, lost),
        "decided": lambda: store.note_decided(lost, measured({"g-0.0-0": 1}, "g-1.0")),
    }
    with pytest.raises(LeaseLost):
        writes[write]()
    assert [rows(engine, table) for table in schema.metadata.sorted_tables] == before


def test_a_promotion_moves_everything_at_once(store: Store, engine: Engine, seed: Any) -> None:
    claim = claim_of(store)
    teach(store, claim)
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    store.loaded(claim)
    store.promote(claim, {"seconds": 1.0}, Probe(1e-5, 64), keep_served=2)
    assert seed.one(schema.policies, "starter").live_version == 1
    assert {row.version: row.state for row in rows(engine, schema.policy_versions)} == {0: "retired", 1: "live"}
    assert {(row.state, row.trained_in_step, row.why_not_trained) for row in rows(engine, schema.trajectories)} == {
        ("trained", 1, None)
    }
    assert {row.state for row in rows(engine, schema.groups)} == {"trained"}
    assert {(row.state, row.step) for row in rows(engine, schema.feedback)} == {("used", 1)}
    step = seed.one(schema.steps, "starter#1")
    assert (step.state, step.version_out, step.loss, step.lease_until) == ("promoted", 1, 0.1, None)


def test_only_the_newest_retired_versions_stay_loaded(store: Store, engine: Engine, seed: Any) -> None:
    for number in range(1, 5):
        if number > 1:
            scored_group(seed, f"g{number}", version=number - 1)
        claim = claim_of(store)
        store.trained(claim, FIGURES, Path(f"/adapters/starter@v{number}"), "hash")
        store.promote(claim, {}, PROBE, keep_served=1)
    served = CommandLine(engine).served("default", ["starter"])
    assert served == {f"starter@v{n}": Path(f"/adapters/starter@v{n}") for n in (3, 4)}


def test_what_a_rejected_step_took_counts_as_trained(store: Store, engine: Engine, seed: Any) -> None:
    claim = claim_of(store)
    teach(store, claim)
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    store.reject(claim, "vLLM and trainer disagree", Probe(0.5, 64), {"seconds": 2.0})
    assert seed.one(schema.policies, "starter").live_version == 0
    version = seed.one(schema.policy_versions, "starter@v1")
    assert (version.state, version.served) == ("rejected", False)
    assert (version.probe_k3, version.probe_tokens) == (0.5, 64)
    step = seed.one(schema.steps, "starter#1")
    assert (step.state, step.seconds, step.error) == ("rejected", 2.0, "vLLM and trainer disagree")
    assert {row.state for row in rows(engine, schema.trajectories)} == {"trained"}
    assert store.claim("starter", RULES) is None


def test_a_trajectory_that_teaches_nothing_says_why(store: Store, engine: Engine, seed: Any) -> None:
    scored_group(seed, "h")
    claim = claim_of(store)
    store.note_advantages(claim, {"g-0.0": -0.5, "g-1.0": 0.5}, {"h-0.0": "group_uniform", "h-1.0": "too_long"})
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    store.promote(claim, {}, PROBE, keep_served=2)
    reasons = {row.id: (row.state, row.why_not_trained) for row in rows(engine, schema.trajectories)}
    assert reasons == {
        "g-0.0": ("trained", None),
        "g-1.0": ("trained", None),
        "h-0.0": ("excluded", "group_uniform"),
        "h-1.0": ("excluded", "too_long"),
    }
    assert seed.one(schema.groups, "h").state == "discarded"
    assert {row.target_id: row.state for row in rows(engine, schema.feedback)} == {
        "g-0.0": "used", "g-1.0": "used", "h-0.0": "unused", "h-1.0": "unused",
    }  # fmt: skip


def test_advantages_take_as_many_statements_for_forty_trajectories_as_for_two(
    store: Store, engine: Engine, seed: Any
) -> None:
    for number in range(39):
        scored_group(seed, f"more{number:02}")
    claim = store.claim("starter", RULES.model_copy(update={"max_groups_per_step": 40}))
    assert claim is not None
    ids = sorted(row.trajectory_id for row in rows(engine, schema.step_trajectories))
    assert len(ids) == 80

    def statements(taught: list[str], left_out: list[str]) -> int:
        sent: list[str] = []

        def note(*given: Any) -> None:
            sent.append(given[2])

        event.listen(engine, "before_cursor_execute", note)
        advantages = {one: float(place) for place, one in enumerate(taught)}
        store.note_advantages(claim, advantages, dict.fromkeys(left_out, "group_uniform"))
        event.remove(engine, "before_cursor_execute", note)
        return len(sent)

    assert statements(ids[:40], ids[40:]) == statements(ids[:1], ids[40:41])
    advantages = {row.trajectory_id: row.advantage for row in rows(engine, schema.step_trajectories)}
    assert [advantages[one] for one in ids] == [*map(float, range(40)), *[None] * 40]
    reasons = {row.id: row.why_not_trained for row in rows(engine, schema.trajectories)}
    assert {reasons[one] for one in ids[40:]} == {"group_uniform"} != {reasons[one] for one in ids[:40]}


def test_decided_tokens_take_one_statement_for_any_number_of_completions(
    store: Store, engine: Engine, seed: Any
) -> None:
    for number in range(20):
        scored_group(seed, f"more{number:02}")
    claim = claim_of(store)
    ids = [row.id for row in rows(engine, schema.completions)]
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
    store.note_decided(claim, measured({one: place for place, one in enumerate(ids)}))
    assert len([one for one in sent if one.startswith("UPDATE completions")]) == 1
    assert {row.id: row.decided_tokens for row in rows(engine, schema.completions)} == {
        one: place for place, one in enumerate(ids)
    }


def test_a_trajectory_that_constraints_decided_is_not_trained(store: Store, engine: Engine, seed: Any) -> None:
    claim = claim_of(store)
    teach(store, claim)
    store.note_decided(claim, measured({"g-0.0-0": 2, "g-0.0-1": 2, "g-1.0-0": 0}, "g-0.0", disagreements=3))
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    store.promote(claim, {}, PROBE, keep_served=2)
    reasons = {row.id: (row.state, row.why_not_trained) for row in rows(engine, schema.trajectories)}
    assert reasons == {"g-0.0": ("excluded", "constrained"), "g-1.0": ("trained", None)}
    decided = {row.id: row.decided_tokens for row in rows(engine, schema.completions)}
    assert decided == {"g-0.0-0": 2, "g-0.0-1": 2, "g-1.0-0": 0, "g-1.0-1": None}
    (step,) = rows(engine, schema.steps)
    assert (step.decided_share, step.support_disagreements) == (4 / 10, 3)


def test_adapters_are_those_that_are_still_there(store: Store, engine: Engine, seed: Any) -> None:
    claim = claim_of(store)
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    assert store.adapter_folders(claim, {0, 1, 7}) == {0: None, 1: Path("/adapters/starter@v1")}
    with engine.begin() as connection:
        first = schema.policy_versions.c.version == 1
        connection.execute(update(schema.policy_versions).where(first).values(removed_at=datetime.now(UTC)))
    assert store.adapter_folders(claim, {0, 1}) == {0: None}


def test_feedback_for_a_group_is_used_with_the_group(store: Store, seed: Any) -> None:
    given = seed.feedback("g", kind="group", rewards={"g-0.0": 0.0}, state="applied")
    claim = claim_of(store)
    teach(store, claim)
    store.trained(claim, FIGURES, Path("/adapters/starter@v1"), "hash")
    store.promote(claim, {}, PROBE, keep_served=2)
    assert seed.one(schema.feedback, given).state == "used"


@pytest.mark.parametrize(("state", "reason"), [("noop", "group_uniform"), ("failed", "step_failed")])
def test_a_step_without_a_version_discards_what_it_took(
    store: Store, engine: Engine, seed: Any, state: str, reason: str
) -> None:
    claim = claim_of(store)
    store.end_without_version(claim, state, "why", {"kept": "/rows"})
    assert {(row.state, row.reason) for row in rows(engine, schema.groups)} == {("discarded", reason)}
    assert {(row.state, row.why_not_trained) for row in rows(engine, schema.trajectories)} == {("excluded", reason)}
    step = seed.one(schema.steps, "starter#1")
    assert (step.state, step.error, step.kept) == (state, "why", "/rows")
    assert seed.one(schema.policies, "starter").live_version == 0


def test_a_uniform_group_is_discarded_with_the_step_and_its_feedback_says_so(
    store: Store, engine: Engine, seed: Any
) -> None:
    scored_group(seed, "u")
    with engine.begin() as connection:
        connection.execute(update(schema.trajectories).where(schema.trajectories.c.group_id == "u").values(reward=0.0))
    claim = claim_of(store)
    assert {member.group_id for member in store.members(claim)} == {"g"}
    group = seed.one(schema.groups, "u")
    assert (group.state, group.reason) == ("discarded", "group_uniform")
    reasons = {(row.state, row.reason) for row in rows(engine, schema.feedback) if row.target_id.startswith("u")}
    assert reasons == {("unused", "group_uniform")}
    assert seed.one(schema.trajectories, "u-0.0").why_not_trained == "group_uniform"


def test_stale_groups_are_discarded_while_claiming(store: Store, engine: Engine, seed: Any) -> None:
    seed.insert(
        schema.policy_versions, project="default", id="starter@v1", policy="starter", version=1, parent=0, state="live",
        served=True, created_at=seed.now, promoted_at=seed.now,
    )  # fmt: skip
    with engine.begin() as connection:
        connection.execute(update(schema.policies).values(live_version=1, next_version=2))
    assert store.claim("starter", RULES.model_copy(update={"max_staleness": 0})) is None
    assert {row.why_not_trained for row in rows(engine, schema.trajectories)} == {"stale"}


def single(seed: Any, name: str, reward: float, **values: Any) -> None:
    """A trajectory that stayed alone, in a group of its own."""
    seed.group(f"of {name}", formed_by="single", state="scored", compared_with="baseline", closed_at=datetime.now(UTC))
    seed.trajectory(name, f"of {name}", state="rewarded", reward=reward, **values)


def baselines(engine: Engine) -> dict[tuple[str, str], tuple[float, int]]:
    return {(row.task, row.end_user): (row.mean, row.count) for row in rows(engine, schema.baselines)}


def compared(engine: Engine) -> dict[str, float | None]:
    return {row.trajectory_id: row.baseline for row in rows(engine, schema.step_trajectories)}


def test_singles_are_claimed_with_what_was_expected_of_them_and_their_rewards_count_from_then_on(
    store: Store, engine: Engine, seed: Any
) -> None:
    for number, reward in enumerate((1.0, 0.0, 0.5)):
        single(seed, f"s{number}", reward)
    first = claim_of(store)
    assert compared(engine) == {"g-0.0": None, "g-1.0": None, "s0": 0.25, "s1": 0.75, "s2": 0.5}
    assert baselines(engine) == {("", ""): (0.5, 3)}
    step = seed.one(schema.steps, "starter#1")
    assert (step.groups, step.trajectories, step.baselined, first.baselined) == (4, 5, 3, 3)
    assert {member.trajectory_id for member in store.members(first) if member.alone} == {"s0", "s1", "s2"}
    store.end_without_version(first, "noop", "nothing", {})

    scored_group(seed, "h")
    single(seed, "t", 0.1)
    claim_of(store)
    assert compared(engine)["t"] == 0.5
    assert baselines(engine) == {("", ""): (pytest.approx(0.4), 4)}


def test_a_step_of_groups_alone_has_no_baselines(store: Store, engine: Engine, seed: Any) -> None:
    claim_of(store)
    assert seed.one(schema.steps, "starter#1").baselined == 0
    assert baselines(engine) == {}


def test_tasks_and_users_have_means_of_their_own_and_no_other_policy_or_project_has_a_part_in_them(
    store: Store, engine: Engine, seed: Any
) -> None:
    seed.project("other")
    now = seed.now
    for project, mean in (("other", 9.0), ("default", 0.5)):
        seed.insert(
            schema.baselines, project=project, policy="starter", task="hints", end_user="", mean=mean, count=2,
            updated_at=now,
        )  # fmt: skip
    single(seed, "a", 1.0, task="hints", end_user="ada")
    single(seed, "b", 0.0, task="hints")
    single(seed, "c", 0.0, end_user="ada")
    claim = claim_of(store)
    assert baselines(engine).keys() == {("hints", ""), ("hints", "ada"), ("", ""), ("", "ada")}
    with engine.connect() as connection:
        query = select(schema.baselines.c.mean).where(schema.baselines.c.project == "other")
        assert connection.execute(query).scalars().all() == [9.0]
    assert {m.trajectory_id: m.baseline for m in store.members(claim) if m.alone} == {
        "a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3), "c": None,
    }  # fmt: skip
    assert claim.baselined == 2


def test_a_step_that_is_taken_over_keeps_its_baselines_and_counts_no_reward_twice(
    store: Store, engine: Engine, seed: Any
) -> None:
    for number, reward in enumerate((1.0, 0.0)):
        single(seed, f"s{number}", reward)
    lost = claim_of(store)
    before = baselines(engine), compared(engine)
    with engine.begin() as connection:
        connection.execute(update(schema.steps).values(lease_until=datetime.now(UTC) - timedelta(seconds=1)))
    again = claim_of(store)
    assert (again.attempt, again.baselined) == (2, lost.baselined) == (2, 2)
    assert (baselines(engine), compared(engine)) == before


def test_a_trajectory_of_which_nothing_can_be_trained_on_comes_with_the_reason_of_its_completions(
    store: Store, engine: Engine
) -> None:
    with engine.begin() as connection:
        of_it = schema.completions.c.trajectory_id == "g-0.0"
        connection.execute(update(schema.completions).where(of_it).values(why_not_trained="greedy"))
    silent, heard = store.members(claim_of(store))
    assert (silent.completions, silent.silent) == ((), "greedy")
    assert heard.completions and heard.silent is None


def test_completions_come_with_what_bent_their_sampling(store: Store, engine: Engine) -> None:
    with engine.begin() as connection:
        first = update(schema.completions).where(schema.completions.c.id == "g-0.0-0")
        sampling = {"temperature": 0.7, "stop_token_ids": [9]}
        constraints = {"top_p": 0.9, "logit_bias": {"5": 200, "6": -1.5}, "grammar": "tools"}
        connection.execute(first.values(sampling=sampling, constraints=constraints))
        second = update(schema.completions).where(schema.completions.c.id == "g-0.0-1")
        connection.execute(second.values(sampling={"temperature": 0}, explored=0.6))
    bent, explored = store.members(claim_of(store))[0].completions
    assert bent.constraints == Constraints(
        top_p=0.9, logit_bias=((5, 100.0), (6, -1.5)), grammar="tools", stop_token_ids=(9,)
    )
    assert (bent.temperature, explored.temperature, explored.constraints) == (0.7, 0.6, None)


def test_a_member_tells_the_seed_of_its_first_answer(store: Store, engine: Engine) -> None:
    with engine.begin() as connection:
        first = schema.completions.c.id == "g-0.0-0"
        connection.execute(update(schema.completions).where(first).values(sampling={"seed": 7}, choice=1))
    claim = claim_of(store)
    seeded, free = store.members(claim)
    assert (seeded.seed, free.seed) == ((7, 1), None)
    with engine.begin() as connection:
        connection.execute(update(schema.completions).where(first).values(explored=0.7))
    assert [member.seed for member in store.members(claim)] == [None, None]
