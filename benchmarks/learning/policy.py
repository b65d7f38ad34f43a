"""A policy on a running stack that learns from an app of its own; `thumbs`, `warm` and `benchmarks.real` share it."""

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from whetstone.database.engine import connect
from whetstone.demo.agent_process import app, report_of, still_runs
from whetstone.domain.stats import Interval
from whetstone.registry.projects import Rewards, Store
from whetstone.stack import admin_client
from whetstone.stack.stack import Stack

POLL_S = 0.2


class LearningPolicy:
    """The policy, its steps, and how many requests of the app have failed."""

    def __init__(
        self,
        stack: Stack,
        script: Path,
        figures: Callable[[dict[str, Any]], str],
        console: Console,
        options: Sequence[str] = (),
        python: Path | None = None,
    ) -> None:
        """`script`: the app; `options`: what it is always given; `python`: what runs it, None: this interpreter.

        `figures` returns what is printed of a promoted step. Steps that ended before, in the same data folder, are
        neither printed nor awaited.
        """
        self._options, self._python = options, python
        self._stack, self._script, self._figures, self._console = stack, script, figures, console
        self._settings = stack.settings
        self._store = Store(connect(stack.settings.database_url))
        self._shown = len(self.ended)
        self.failed_requests = 0
        self.after_step: Callable[[], None] = lambda: None
        """Called after each step that is awaited."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self._store.steps(self._settings.project, self._settings.policy)

    @property
    def ended(self) -> list[dict[str, Any]]:
        return [step for step in self.steps if step["ended_at"] is not None]

    @property
    def rewards(self) -> dict[int, Rewards]:
        """Rewards in training, by version."""
        return self._store.rewards_by_version(self._settings.project, self._settings.policy)

    @property
    def fates(self) -> dict[str, int]:
        """How many training trajectories were trained on, and how many were not, by reason."""
        return self._store.training_fates(self._settings.project, self._settings.policy)

    @property
    def live(self) -> str:
        """The live version."""
        return self._store.live_name(self._settings)

    def run(self, *options: str, steps: int | None = None, seconds: float = math.inf) -> dict[str, Any]:
        """Run the app to its end, or until the policy has taken so many steps, or so long; return its report."""
        arguments = ["--seed", str(self._settings.seed), *self._options, *options]
        with app(self._stack, self._script, arguments, python=self._python) as process:
            if steps is not None:
                self.await_steps(steps, process, seconds)
                process.terminate()
            report = report_of(process, self._stack)
        self.failed_requests += report["failed_requests"]
        return report

    def learn(self, steps: int, *options: str, seconds: float = math.inf) -> None:
        """Let the policy train on what the app does, for so many steps, or so long; a further step that has begun is
        awaited."""
        self.set_state("training")
        self.run(*options, steps=steps, seconds=seconds)
        self.set_state("paused")
        while self._is_busy:
            self._look()
        self._show()

    def imitate(self, source: str, min_reward: float | None, limit: int) -> None:
        """Take a supervised step; if one is requested already, by a run that was cut off, await that one.

        `min_reward`: of the answers; None: with or without a reward.

        Raises:
            RefusedByProxy: the proxy refuses it.
        """
        self.set_state("recording")
        if not self._is_busy:
            self._ask("step", {"kind": "sft", "from": source, "min_reward": min_reward, "limit": limit})
        self.await_steps(1)

    def learn_from_rewards(self) -> None:
        """Take a policy-gradient step on what is rewarded.

        Raises:
            RefusedByProxy: the proxy refuses it.
        """
        self._ask("step", {"kind": "grpo"})
        self.await_steps(1)

    def learn_from_words(self, source: str, limit: int) -> None:
        """Take a hindsight step.

        Raises:
            RefusedByProxy: the proxy refuses it.
        """
        self._ask("step", {"kind": "hindsight", "from": source, "limit": limit})
        self.await_steps(1)

    def set_state(self, state: str) -> None:
        """Let the policy train, only record, or pause."""
        self._store.set_policy_state(self._settings.project, self._settings.policy, state)

    def look(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a moment, check that all programs and the app still run, and print the steps that have ended."""
        still_runs(process)
        self._look()
        self._show()

    def promote(self, version: int) -> None:
        """Let this version answer, and the next step start from it.

        Raises:
            RefusedByProxy: the proxy refuses it.
        """
        self._ask("promote", {"version": version})

    def await_rewarded(self, policy: str, count: int) -> None:
        """Wait until so many of a policy's trajectories are in SQL with their rewards."""
        while (
            sum(r.trajectories for r in self._store.rewards_by_version(self._settings.project, policy).values()) < count
        ):
            self._look()

    def await_steps(
        self, count: int, process: subprocess.Popen[bytes] | None = None, seconds: float = math.inf
    ) -> None:
        """Wait until so many more steps have ended, or so long, and print each."""
        due, until_s = self._shown + count, time.monotonic() + seconds
        while self._shown < due and time.monotonic() < until_s:
            if process is not None:
                still_runs(process)
            self._look()
            self._show()

    @property
    def _is_busy(self) -> bool:
        """Whether a step runs or is requested."""
        policies = self._store.policies(self._settings.project)
        requested = any(row["id"] == self._settings.policy and row["step_asked"] is not None for row in policies)
        return requested or len(self.steps) > len(self.ended)

    def _ask(self, action: str, fields: dict[str, Any]) -> None:
        admin_client.ask(self._settings.data, self._settings.policy, action, fields, look="admin_steps")

    def _look(self) -> None:
        self._stack.watch()
        time.sleep(POLL_S)

    def _show(self) -> None:
        """Print the steps that have ended since."""
        for step in self.ended[self._shown :]:
            line = self._figures(step) if step["state"] == "promoted" else f"{step['state']}: {step['error']}"
            self._console.print(f"step {step['number']}  {line}", highlight=False)
            self._shown += 1
            self.after_step()


def cells(interval: Interval, sign: str = "") -> tuple[str, str]:
    """Return a mean and its interval for a table; `sign`: "+" also where they are positive."""
    return f"{interval.mean:{sign}.1%}", f"{interval.low:{sign}.1%} to {interval.high:{sign}.1%}"
