"""What a policy has been through, in rows: versions, their steps, groups and rewards. For the dashboard's tests."""

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, update

from migrations import schema
from tests.conftest import Seed

HOSTILE = "<script>alert('x')</script>\"'&"
"""What must never be anything but text on a page."""


class Story:
    """A policy that has learned. The same each time."""

    def __init__(self, engine: Engine, now: datetime, project: str = "default", policy: str = "starter") -> None:
        self.seed = Seed(engine, now)
        self.now, self.project, self.policy = now, project, policy
        self._draw = random.Random(7)

    def tell(self, versions: int = 24, attempts: int = 8) -> "Story":
        """Steps 1 to `versions`, each with a version; some are rejected, the newest is live."""
        live = 0
        self.rewarded(0, attempts, self.now - timedelta(minutes=8 * versions), worth=0.33)
        for number in range(1, versions + 1):
            began = self.now - timedelta(minutes=7 * (versions - number + 1))
            is_rejected = number % 7 == 5
            self.version(number, live, began, is_rejected=is_rejected)
            self.step(number, live, began, is_rejected=is_rejected)
            self.rewarded(number, attempts, began, worth=0.35 + 0.4 * number / versions - 0.25 * is_rejected)
            self._decide(number, live, began, is_rejected=is_rejected)
            live = live if is_rejected else number
        self.live(live, versions)
        return self

    def live(self, version: int, newest: int) -> None:
        """As if this one had gone live last."""
        p, v = schema.policies, schema.policy_versions
        with self.seed.engine.begin() as connection:
            of_policy = (v.c.project == self.project, v.c.policy == self.policy)
            connection.execute(update(v).where(*of_policy, v.c.state == "live").values(state="retired"))
            connection.execute(update(v).where(*of_policy, v.c.version == version).values(state="live"))
            is_it = (p.c.project == self.project, p.c.id == self.policy)
            told = {"live_version": version, "next_version": newest + 1, "next_step": newest + 1}
            connection.execute(update(p).where(*is_it).values(told | {"state": "training"}))

    def version(self, number: int, parent: int, began: datetime, *, is_rejected: bool = False) -> None:
        """A version as its step left it."""
        self.seed.insert(
            schema.policy_versions, project=self.project, id=f"{self.policy}@v{number}", policy=self.policy,
            version=number, parent=parent, state="rejected" if is_rejected else "retired", step=number,
            reason=f"held-out reward fell by 0.21 {HOSTILE}" if is_rejected else None, served=False,
            adapter_path=f"/nowhere/{number}", probe_k3=3.1e-7 * number, heldout_mean=0.4 + 0.01 * number,
            heldout_count=64, created_at=began, promoted_at=None if is_rejected else began + timedelta(minutes=2),
            tested_since=began, unserved_at=None,
        )  # fmt: skip

    def step(
        self, number: int, version_in: int, began: datetime, *, is_rejected: bool = False, groups: int = 3
    ) -> None:
        """One step and what it trained on."""
        draw, step_id = self._draw, f"{self.policy}#{number}"
        self.seed.insert(
            schema.steps, project=self.project, id=step_id, policy=self.policy, number=number,
            state="rejected" if is_rejected else "promoted", version_in=version_in, version_out=number, groups=groups,
            trajectories=4 * groups, reward_mean=0.4 + 0.012 * number, reward_spread=0.31, kl=0.0004 * number,
            loss=0.01 - 0.004 * draw.random(), entropy=1.1 - 0.015 * number, mismatch_k3=2e-6 * draw.random(),
            fresh_share=0.93, masked_share=0.01, grad_norm=0.4 + 0.3 * draw.random(), sampled_tokens=6400,
            tokens_per_s=480 + 40 * draw.random(), seconds=21 + 6 * draw.random(), attempt=1, created_at=began,
            phases={"claim": 0.02, "read": 0.4, "train": 14.2, "load": 2.2, "probe": 3.5}, config={"lora_rank": 16},
            error=f"the gate: {HOSTILE}" if is_rejected else None, ended_at=began + timedelta(seconds=25), kind="grpo",
            loss_function="dppo_tv", learning_rate=1e-4, advantage_spread=0.9, completions=24, rows=20,
            read_tokens=9000, discarded={"no_spread": 2},
        )  # fmt: skip
        for place in range(groups):
            self._group(f"{self.policy}-g{number}-{place}", step_id, number, began)

    def _group(self, group_id: str, step_id: str, number: int, began: datetime) -> None:
        rewards = [float(self._draw.random() < 0.35 + 0.02 * number) for _ in range(4)]
        mean = sum(rewards) / 4
        self.seed.group(
            group_id, self.project, policy=self.policy, state="trained", size=4, rewarded=4, reward_mean=mean,
            reward_spread=(mean * (1 - mean)) ** 0.5, step=number, created_at=began, closed_at=began,
        )  # fmt: skip
        for place, reward in enumerate(rewards):
            member = f"{group_id}-{place}"
            self.attempt(member, number, began, reward, group_id=group_id, state="trained", trained_in_step=number)
            self.seed.insert(
                schema.step_trajectories, project=self.project, step_id=step_id, trajectory_id=member,
                policy=self.policy, group_id=group_id, reward=reward, advantage=reward - mean, staleness=place % 2,
            )  # fmt: skip

    def rewarded(self, version: int, attempts: int, began: datetime, worth: float) -> None:
        """Trajectories that began with a version, of that mean reward or near it."""
        for place in range(attempts):
            reward = round(min(1.0, max(0.0, self._draw.gauss(worth, 0.15))), 3)
            self.attempt(f"{self.policy}-v{version}-{place}", version, began, reward, state="rewarded")

    def played(self, version: int, won: Sequence[int]) -> None:
        """Held-out games of a version as the demo's agent records them: ten first prompts, 0 or 1 for each game."""
        rows = [
            {
                "project": self.project, "id": f"{self.policy}-e{version}-{game}", "policy": self.policy,
                "split": "eval", "no_train": False, "state": "rewarded", "first_version": version,
                "last_version": version, "completions": 3, "sampled_tokens": 3, "reward": float(reward),
                "reward_source": "trajectory", "why_not_trained": "split_eval",
                "prompt_hash": f"board{game // 2 % 9}" if game % 2 else "empty board",
                "created_at": self.now + timedelta(milliseconds=game), "last_seen_at": self.now, "ended_at": self.now,
            }
            for game, reward in enumerate(won)
        ]  # fmt: skip
        with self.seed.engine.begin() as connection:
            connection.execute(schema.trajectories.insert(), rows)

    def attempt(self, trajectory_id: str, version: int, began: datetime, reward: float, **values: Any) -> None:
        """One trajectory with a reward."""
        group_id = values.pop("group_id", None)
        self.seed.trajectory(
            trajectory_id, group_id, self.project, turns=0, policy=self.policy, first_version=version,
            last_version=version, created_at=began, last_seen_at=began, ended_at=began, reward=reward,
            reward_source="trajectory", **values,
        )  # fmt: skip
        self.seed.completion(
            trajectory_id, 0, self.project, policy=self.policy, policy_version=version, created_at=began,
            response={"role": "assistant", "content": HOSTILE},
        )  # fmt: skip

    def _decide(self, number: int, parent: int, began: datetime, *, is_rejected: bool) -> None:
        self.seed.insert(
            schema.gate_results, project=self.project, id=f"{self.project}-{self.policy}-d{number}",
            policy=self.policy, version=number, against=parent, test="heldout" if is_rejected else "probe",
            decision="reject" if is_rejected else "promote", reason=f"because {HOSTILE}",
            figures={"mean_k3": 1.2e-7, "difference": -0.21}, created_at=began,
        )  # fmt: skip
