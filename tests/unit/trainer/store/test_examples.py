"""Which answers a supervised step takes, and what it reads of the log and of what was rendered."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, update

from migrations import schema
from trainer.domain.claims import Claim, Probe
from trainer.domain.examples.sft_examples import Example, RenderedExample
from trainer.errors import LeaseLost
from trainer.store.unit_of_work import Store
from whetstone.config.trainer import TrainerSettings

LATER = datetime(2026, 1, 2, tzinfo=UTC)

RULES = TrainerSettings(groups_per_step=1, min_fresh_share=0)


@pytest.fixture
def store(engine: Engine, seed: Any) -> Store:
    return Store(engine, "default")


class Asking:
    """An admin who asks for supervised steps, and a worker that begins them."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine, self.store = engine, store

    def write(self, table: Any, where: Any, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(update(table).where(where).values(**values))

    def rows(self, table: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(table)))

    def claim(self, source: str = "demonstrations", min_reward: float | None = None, limit: int = 100) -> Claim:
        asked = {"kind": "sft", "from": source, "min_reward": min_reward, "limit": limit}
        self.write(
            schema.policies, schema.policies.c.id == "starter", step_asked=asked, step_asked_at=datetime.now(UTC)
        )
        claim = self.store.claim("starter", RULES)
        assert claim is not None and claim.kind == "sft" and claim.wanted is not None
        self.store.take_examples(claim, claim.wanted)
        return claim

    def taken(self, *args: Any, **values: Any) -> list[str]:
        """Ids of what a step of that kind takes; the step is over at once."""
        claim = self.claim(*args, **values)
        ids = [example.source_id for example in self.store.examples(claim)]
        self.store.end_without_version(claim, "noop", "", {})
        return ids

    def take_over(self) -> Claim:
        self.write(schema.steps, schema.steps.c.lease_until.is_not(None), lease_until=datetime.now(UTC))
        claim = self.store.claim("starter", RULES)
        assert claim is not None and claim.wanted is not None
        self.store.take_examples(claim, claim.wanted)
        return claim


@pytest.fixture
def asking(engine: Engine, store: Store) -> Asking:
    return Asking(engine, store)


def shown(seed: Any, trajectory_id: str, text: str = "better", **values: Any) -> str:
    """A demonstration, as the judging worker leaves it."""
    fields = {"source": "demonstration", "state": "applied", "trajectory_id": trajectory_id, "final": False}
    message = {"role": "assistant", "content": text}
    return str(seed.feedback(trajectory_id, demonstration=message, **(fields | values)))


def example(asking: Asking, claim: Claim) -> Example:
    (only,) = asking.store.examples(claim)
    return only


# --- demonstrations


def test_a_demonstration_stands_after_the_very_ids_of_the_prompt_that_it_answers_better(
    asking: Asking, seed: Any
) -> None:
    seed.trajectory("t", turns=3)
    given = shown(seed, "t", completion_id="t-1")
    one = example(asking, asking.claim())
    assert (one.source_id, one.trajectory_id, one.prompt_ids) == (given, "t", (1, 2, 3, 4, 11, 12))
    assert one.token_ids is None and one.text is not None
    assert one.text.answer == {"role": "assistant", "content": "better"}
    assert [message["content"] for message in one.text.messages] == ["question 0", "answer 0", "question 1"]
    assert (one.text.endpoint, one.text.whole) == ("chat.completions", True)


def test_a_demonstration_for_a_trajectory_is_its_last_answer(asking: Asking, seed: Any) -> None:
    seed.trajectory("t", turns=2)
    shown(seed, "t")
    assert example(asking, asking.claim()).prompt_ids == (1, 2, 3, 4, 11, 12)


def test_a_prompt_without_logged_ids_is_rendered_with_its_tools_and_template_arguments(
    asking: Asking, seed: Any
) -> None:
    seed.trajectory("t")
    tools = [{"type": "function", "function": {"name": "f"}}]
    asking.write(schema.completions, schema.completions.c.id == "t-0", prompt_token_ids=None, token_ids=None,
                 tools=tools, sampling={"chat_template_kwargs": {"enable_thinking": False}})  # fmt: skip
    shown(seed, "t")
    one = example(asking, asking.claim())
    assert one.prompt_ids is None and one.text is not None
    assert (one.text.tools, one.text.template_arguments) == (tools, {"enable_thinking": False})


def test_of_two_demonstrations_for_the_same_answer_the_later_one_counts(asking: Asking, seed: Any) -> None:
    seed.trajectory("t", turns=2)
    shown(seed, "t", "old", state="used", completion_id="t-1")
    last = shown(seed, "t", "new", created_at=seed.now + timedelta(seconds=1))
    other = shown(seed, "t", "of another turn", completion_id="t-0")
    assert asking.taken() == [other, last]


@pytest.mark.parametrize(
    "values",
    [
        {"state": "waiting"}, {"state": "superseded"}, {"state": "failed"}, {"withdrawn_at": LATER},
    ],
    ids=str,
)  # fmt: skip
def test_a_demonstration_that_does_not_stand_teaches_nothing(asking: Asking, seed: Any, values: dict[str, Any]) -> None:
    seed.trajectory("t")
    shown(seed, "t", **values)
    assert asking.taken() == []


@pytest.mark.parametrize("values", [{"split": "eval"}, {"no_train": True}], ids=str)
@pytest.mark.parametrize("source", ["demonstrations", "best", "teacher"])
def test_what_the_app_keeps_from_training_is_not_imitated_either(
    asking: Asking, seed: Any, source: str, values: dict[str, Any]
) -> None:
    spoken_by = "teacher" if source == "teacher" else "starter"
    seed.trajectory("t", policy=spoken_by, state="rewarded", reward=1.0, **values)
    asking.write(schema.completions, schema.completions.c.id == "t-0", policy=spoken_by)
    shown(seed, "t")
    assert asking.taken(source, 0.0 if source != "demonstrations" else None) == []


def test_a_demonstration_for_another_policys_answer_or_of_another_project_is_not_ours(
    asking: Asking, seed: Any
) -> None:
    seed.trajectory("t")
    asking.write(schema.completions, schema.completions.c.id == "t-0", policy="other")
    shown(seed, "t")
    seed.project("foreign")
    seed.trajectory("u", project="foreign")
    shown(seed, "u", project="foreign")
    assert asking.taken() == []


# --- the best of the policy's own


def group(seed: Any, name: str, *rewards: float | None) -> None:
    seed.group(name, state="scored")
    for number, reward in enumerate(rewards):
        seed.trajectory(f"{name}{number}", name, turns=2, state="rewarded", reward=reward)


def test_the_best_of_each_group_is_imitated_as_it_was_logged(asking: Asking, seed: Any) -> None:
    group(seed, "g", 0.0, 1.0, None)
    group(seed, "h", -1.0, -0.5)
    claim = asking.claim("best")
    examples = asking.store.examples(claim)
    assert [one.source_id for one in examples] == ["g1-0", "g1-1", "h1-0", "h1-1"]
    assert [(one.prompt_ids, one.token_ids) for one in examples[:2]] == [
        ((1, 2), (3, 4)),
        ((1, 2, 3, 4, 11, 12), (13, 14)),
    ]
    assert {one.text for one in examples} == {None}
    assert seed.one(schema.steps, "starter#1").trajectories == 2
    stored = asking.rows(schema.examples)
    assert {(row.prompt_token_ids, row.token_ids) for row in stored} == {(None, None)}  # they stand in the log


def test_an_attempt_that_is_no_better_than_the_others_of_its_group_is_not_imitated(asking: Asking, seed: Any) -> None:
    group(seed, "g", 0.0, 0.0)
    seed.trajectory("alone", None, state="rewarded", reward=1.0)
    assert asking.taken("best") == []


def test_with_a_lowest_reward_all_that_reach_it_are_imitated_the_best_first(asking: Asking, seed: Any) -> None:
    group(seed, "g", 0.5, 0.5, 0.2)
    seed.trajectory("alone", None, state="rewarded", reward=0.9)
    assert asking.taken("best", 0.9) == ["alone-0"]
    assert asking.taken("best", 0.5, limit=2) == ["g0-0", "g0-1", "g1-0", "g1-1"]
    assert set(asking.taken("best", 0.5)) == {"alone-0", "g0-0", "g0-1", "g1-0", "g1-1"}


def test_answers_that_broke_off_or_were_asked_again_are_not_imitated(asking: Asking, seed: Any) -> None:
    group(seed, "g", 0.0, 1.0)
    seed.trajectory("retried", "g", state="excluded", reward=2.0, why_not_trained="superseded")
    c = schema.completions.c
    asking.write(schema.completions, c.id == "g1-0", status="aborted")
    assert asking.taken("best") == ["g1-1"]
    asking.write(schema.completions, c.id == "g1-1", why_not_trained="superseded")
    assert asking.taken("best") == []


def test_tokens_that_no_gradient_may_weigh_can_be_imitated(asking: Asking, seed: Any) -> None:
    group(seed, "g", 0.0, 1.0)
    asking.write(schema.completions, schema.completions.c.turn == 0, why_not_trained="sampling_bent: top_p")
    asking.write(schema.completions, schema.completions.c.turn == 1, why_not_trained="greedy")
    assert asking.taken("best") == ["g1-0", "g1-1"]


def test_a_step_on_rewards_takes_the_best_attempts_that_are_over(asking: Asking, seed: Any) -> None:
    for name, reward in (("old", 0.5), ("left", 0.25), ("new", 2.0), ("next", 1.0)):
        group(seed, name, 0.0, reward)
    for name, state in (("old", "trained"), ("left", "excluded"), ("new", "ended")):
        asking.write(schema.trajectories, schema.trajectories.c.group_id == name, state=state)
        asking.write(schema.groups, schema.groups.c.id == name, state="open")
    asking.write(schema.groups, schema.groups.c.id == "next", closed_at=datetime.now(UTC))
    seed.trajectory("eval", "old", split="eval", state="trained", reward=3.0)
    claim = asking.store.claim("starter", RULES)
    assert claim is not None and claim.kind == "grpo"
    asking.store.take_replay(claim, 1)
    asking.store.take_replay(claim, 2)  # the step has some already
    assert {one.trajectory_id for one in asking.store.examples(claim)} == {"old1"}
    step = seed.one(schema.steps, claim.id)
    assert (step.trajectories, step.imitates["limit"], step.imitates["trajectories"]) == (2, 1, 1)
    asking.store.end_without_version(claim, "noop", "", {})
    group(seed, "more", 0.0, 1.0)
    asking.write(schema.groups, schema.groups.c.id == "more", closed_at=datetime.now(UTC))
    again = asking.store.claim("starter", RULES)
    assert again is not None
    asking.store.take_replay(again, 5)
    assert {one.trajectory_id for one in asking.store.examples(again)} == {"old1", "left1", "next1"}


# --- another policy's


def teach(asking: Asking, seed: Any, name: str, reward: float | None = None, **values: Any) -> None:
    """What another server answered: text, no ids."""
    seed.trajectory(name, policy="teacher", state="ended" if reward is None else "rewarded", reward=reward)
    unknown = {"prompt_token_ids": None, "token_ids": None, "inference_logprobs": None, "policy": "teacher",
               "why_not_trained": "demonstration"}  # fmt: skip
    asking.write(schema.completions, schema.completions.c.trajectory_id == name, **(unknown | values))


def test_another_servers_answers_are_rendered_with_their_conversation(asking: Asking, seed: Any) -> None:
    teach(asking, seed, "t")
    teach(asking, seed, "cut", finish_reason="length")
    cut, one = asking.store.examples(asking.claim("teacher"))
    assert (one.source_id, one.prompt_ids, one.token_ids) == ("t-0", None, None)
    assert one.text is not None and cut.text is not None
    assert [message["content"] for message in one.text.messages] == ["question 0"]
    assert one.text.answer == {"role": "assistant", "content": "answer 0"}
    assert (one.text.whole, cut.text.whole) == (True, False)


def test_only_what_reached_the_lowest_reward_is_learned_from_another(asking: Asking, seed: Any) -> None:
    teach(asking, seed, "unknown")
    teach(asking, seed, "bad", 0.1)
    teach(asking, seed, "good", 0.9)
    assert asking.taken("teacher", 0.5) == ["good-0"]
    assert asking.taken("teacher", limit=2) == ["bad-0", "unknown-0"]  # no step has imitated them yet


def test_another_policy_of_our_own_vllm_is_imitated_in_its_very_ids(asking: Asking, seed: Any) -> None:
    seed.trajectory("t", policy="second", turns=1)
    asking.write(schema.completions, schema.completions.c.id == "t-0", policy="second", endpoint="messages")
    one = example(asking, asking.claim("second"))
    assert (one.prompt_ids, one.token_ids, one.text) == ((1, 2), (3, 4), None)


# --- what a step has


def test_what_was_rendered_is_read_again_and_not_rendered_twice(asking: Asking, seed: Any) -> None:
    teach(asking, seed, "t")
    seed.trajectory("u")
    given = shown(seed, "u")
    claim = asking.claim("teacher")
    asking.store.rendered(claim, [RenderedExample("t-0", (1, 5, 6), (7, 2))])
    assert example(asking, claim) == Example("t-0", "t", (1, 5, 6), (7, 2))
    asking.store.end_without_version(claim, "noop", "", {})
    claim = asking.claim()
    asking.store.rendered(claim, [RenderedExample(given, None, (9, 2))])
    assert example(asking, claim) == Example(given, "u", (1, 2), (9, 2))
    asking.store.end_without_version(claim, "noop", "", {})
    assert {one.text for one in asking.store.examples(asking.claim("teacher"))} == {None}


def test_what_cannot_be_rendered_takes_no_place_in_later_steps(asking: Asking, seed: Any) -> None:
    teach(asking, seed, "t")
    teach(asking, seed, "u")
    claim = asking.claim("teacher", limit=1)
    assert example(asking, claim).source_id == "t-0"
    asking.store.rendered(claim, [RenderedExample("t-0", left_out="no_end")])
    assert example(asking, claim) == Example("t-0", "t", left_out="no_end")
    asking.store.end_without_version(claim, "noop", "", {})
    assert [asking.taken("teacher", limit=1) for _ in range(2)] == [["u-0"], ["u-0"]]


def test_what_was_too_long_is_tried_again(asking: Asking, seed: Any) -> None:
    teach(asking, seed, "t")
    claim = asking.claim("teacher")
    asking.store.rendered(claim, [RenderedExample("t-0", left_out="too_long")])
    asking.store.end_without_version(claim, "noop", "", {})
    one = example(asking, asking.claim("teacher"))
    assert one.left_out is None and one.text is not None


def test_steps_take_in_turns_what_one_of_them_has_no_room_for(asking: Asking, seed: Any) -> None:
    given = []
    for number in range(3):
        seed.trajectory(f"t{number}")
        given.append(shown(seed, f"t{number}", created_at=seed.now + timedelta(seconds=number)))
    first, second, third = given
    assert [asking.taken(limit=2) for _ in range(3)] == [[second, third], [first, third], [second, third]]
    assert {row.source_id: row.step for row in asking.rows(schema.examples)} == {first: 2, second: 3, third: 3}


def test_a_step_that_is_taken_over_has_the_same_examples_whatever_came_meanwhile(asking: Asking, seed: Any) -> None:
    seed.trajectory("t")
    given = shown(seed, "t")
    lost = asking.claim()
    seed.trajectory("u")
    shown(seed, "u")
    asking.write(schema.feedback, schema.feedback.c.id == given, withdrawn_at=datetime.now(UTC))
    again = asking.take_over()
    assert (again.id, again.attempt, again.wanted) == (lost.id, 2, lost.wanted)
    assert [one.source_id for one in asking.store.examples(again)] == [given]


def test_who_lost_the_lease_takes_and_renders_nothing(asking: Asking, seed: Any) -> None:
    seed.trajectory("t")
    given = shown(seed, "t")
    lost = asking.claim()
    assert lost.wanted is not None
    asking.take_over()
    with pytest.raises(LeaseLost):
        asking.store.take_examples(lost, lost.wanted)
    with pytest.raises(LeaseLost):
        asking.store.rendered(lost, [RenderedExample(given, None, (1,))])
    assert [row.token_ids for row in asking.rows(schema.examples)] == [None]


def test_examples_are_one_projects_and_one_policys(asking: Asking, seed: Any) -> None:
    seed.trajectory("t")
    given = shown(seed, "t")
    asking.taken()
    seed.project("foreign")
    (row,) = asking.rows(schema.examples)
    seed.insert(schema.examples, **{**row._mapping, "project": "foreign", "step": 7})
    assert asking.taken() == [given]
    assert {row.project: row.step for row in asking.rows(schema.examples)} == {"default": 2, "foreign": 7}


# --- and policy-gradient steps


def test_what_was_imitated_may_still_be_weighed_and_its_rendered_ids_are_not_in_that_step(
    asking: Asking, seed: Any
) -> None:
    group(seed, "g", 0.0, 1.0)
    asking.write(schema.groups, schema.groups.c.id == "g", closed_at=datetime.now(UTC))
    given = shown(seed, "g0")
    for source in ("best", "demonstrations"):
        claim = asking.claim(source)
        asking.store.rendered(claim, [RenderedExample(given, (50, 51), (52, 2))])
        asking.store.trained(claim, {}, Path("/adapters") / claim.name_out, "hash")
        asking.store.promote(claim, {}, Probe(0.0, 8), 2)
    assert {row.state for row in asking.rows(schema.trajectories)} == {"rewarded"}
    assert asking.rows(schema.step_trajectories) == []
    claim = asking.store.claim("starter", RULES)
    assert claim is not None and (claim.kind, claim.number, claim.version_in) == ("grpo", 3, 2)
    members = asking.store.members(claim)
    assert [member.trajectory_id for member in members] == ["g0", "g1"]
    ids = {
        token_id for member in members for one in member.completions for token_id in (*one.prompt_ids, *one.token_ids)
    }
    assert ids == {1, 2, 3, 4, 11, 12, 13, 14}
    assert asking.store.examples(claim) == []


def test_a_demonstration_tells_which_step_learned_it_and_a_reward_beside_one_does_not(
    asking: Asking, seed: Any
) -> None:
    seed.trajectory("t")
    seed.trajectory("u")
    seed.trajectory("v")
    only, beside = shown(seed, "t"), shown(seed, "u", source="reward", reward=0.0)
    unlearnable = shown(seed, "v")
    claim = asking.claim()
    asking.store.rendered(claim, [RenderedExample(only, None, (7, 2)), RenderedExample(unlearnable, left_out="no_end")])
    asking.store.trained(claim, {}, Path("/adapters") / claim.name_out, "hash")
    asking.store.promote(claim, {}, Probe(0.0, 8), 2)
    told = {one: seed.one(schema.feedback, one) for one in (only, beside, unlearnable)}
    assert (told[only].state, told[only].step) == ("used", 1)
    assert (told[beside].state, told[unlearnable].state) == ("applied", "applied")
    assert asking.claim().number == 2 and only in {
        row.source_id for row in asking.rows(schema.examples) if row.step == 2
    }


# --- pairs


def test_a_pair_is_the_best_and_the_worst_of_a_group_or_of_a_prompt(asking: Asking, seed: Any) -> None:
    t = schema.trajectories.c
    rewards = {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.2, "e": 0.9, "f": 1.0, "lone": 1.0, "barred": 9.0}
    for name, reward in rewards.items():
        seed.trajectory(name, policy="teacher", state="excluded")
        asking.write(schema.completions, schema.completions.c.trajectory_id == name, policy="teacher")
        group = None if name in ("d", "e", "lone") else "h" if name == "f" else "g"
        asking.write(
            schema.trajectories,
            t.id == name,
            group_id=group,
            prompt_hash=None if name == "lone" else "p",
            reward=reward,
            no_train=name == "barred",
        )
    wanted = {"kind": "prefer", "from": "teacher", "min_reward": None, "limit": 5}
    asking.write(schema.policies, schema.policies.c.id == "starter", step_asked=wanted, step_asked_at=datetime.now(UTC))
    claim = asking.store.claim("starter", RULES)
    assert claim is not None and claim.wanted is not None
    asking.store.take_pairs(claim, claim.wanted)
    assert asking.store.pairs(claim) == [("a", "c"), ("e", "d")]
    sources = {example.source_id for example in asking.store.examples(claim)}
    assert sources == {f"{name}-0/prefer" for name in "aced"}
    asking.write(schema.trajectories, t.id == "e", reward=None)
    assert asking.store.pairs(claim) == [("a", "c")]
