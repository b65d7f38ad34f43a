"""What earlier steps know of the prompts of singles, on both databases."""

from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from trainer.domain.baselines import PromptMean
from trainer.domain.eligible_groups import CandidateMember
from trainer.store.baselines import read_comparison, read_prompt_means
from whetstone.config.trainer import TrainerSettings

approx: Any = pytest.approx


def ended(seed: Any, number: int, state: str, parent_kl: float | None, rewards: dict[str, list[float]]) -> None:
    """A step that is over, with the rewards that it took by hash of the prompt."""
    version = number if state in ("promoted", "rejected") else None
    seed.insert(
        schema.steps, project="default", id=f"starter#{number}", policy="starter", number=number, kind="grpo",
        state=state, version_in=0, version_out=version, groups=1, trajectories=2, baselined=2, config={}, attempt=1,
        created_at=seed.now, ended_at=seed.now,
    )  # fmt: skip
    if parent_kl is not None:
        seed.insert(
            schema.gate_results, project="default", id=f"probe-{number}", policy="starter", version=number,
            test="probe", decision="pass", figures={"parent_kl": parent_kl}, created_at=seed.now,
        )  # fmt: skip
    for prompt, values in rewards.items():
        for place, reward in enumerate(values):
            name = f"{number}-{prompt}-{place}"
            seed.trajectory(name, turns=0, prompt_hash=prompt, state="trained")
            seed.insert(
                schema.step_trajectories, project="default", step_id=f"starter#{number}", trajectory_id=name,
                policy="starter", group_id=f"of {name}", reward=reward, staleness=0,
            )  # fmt: skip


def single(name: str, reward: float, prompt: str) -> CandidateMember:
    return CandidateMember(name, reward, 0, 0, 1, prompt=prompt)


def test_rewards_of_a_prompt_count_less_with_each_promoted_step_since(engine: Engine, seed: Any) -> None:
    ended(seed, 1, "promoted", 0.1, {"p": [1.0, 1.0], "q": [0.5], "other": [7.0]})
    ended(seed, 2, "rejected", 0.9, {"p": [0.0]})
    ended(seed, 3, "noop", None, {"p": [0.0]})
    ended(seed, 4, "promoted", 0.05, {"p": [1.0]})
    singles = [single("a", 0.0, "p"), single("b", 1.0, "q"), single("c", 1.0, "new"), single("d", 1.0, "")]
    with engine.connect() as connection:
        means = read_prompt_means(connection, "default", "starter", singles, half_life=0.1)
    # Moved since: step 4 0.05, steps 3 and 2 0.05, step 1 0.15.
    recent, old = 2**-0.5, 2**-1.5
    weight = 3 * recent + 2 * old
    assert means == {
        "p": PromptMean(approx((recent + 2 * old) / weight), approx(weight)),
        "q": PromptMean(approx(0.5), approx(old)),
    }


def test_a_step_without_a_measured_distance_counts_as_one_half_life(engine: Engine, seed: Any) -> None:
    ended(seed, 1, "promoted", None, {"p": [1.0]})
    with engine.connect() as connection:
        means = read_prompt_means(connection, "default", "starter", [single("a", 0.0, "p")], half_life=0.3)
    assert means == {"p": PromptMean(1.0, approx(0.5))}


def test_prompts_count_only_where_the_settings_want_it(engine: Engine, seed: Any) -> None:
    ended(seed, 1, "promoted", 0.0, {"p": [1.0] * 8})
    singles = [single("a", 0.0, "p"), single("b", 0.0, "q")]
    with engine.connect() as connection:
        baselines = {
            wanted: read_comparison(
                connection, "default", "starter", singles, TrainerSettings(single_baseline=wanted)
            )[1].baselines
            for wanted in ("task", "prompt")
        }  # fmt: skip
    assert baselines["task"] == {"a": 0.0, "b": 0.0}
    assert baselines["prompt"] == {"a": approx(0.5), "b": 0.0}
