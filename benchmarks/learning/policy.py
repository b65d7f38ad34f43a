"""A policy on a running stack that learns from an app of its own; `thumbs` and `warm` share it."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from whetstone.database.engine import connect
from whetstone.demo.agent_process import app, report_of, still_runs
from whetstone.domain.stats import Interval
from whetstone.registry.projects import Store
from whetstone.stack.stack import Stack

POLL_S = 0.2


class LearningPolicy:
    """The policy, its steps, and how many requests of the app have failed."""

    def __init__(self, stack: Stack, script: Path, figures: Callable[[dict[str, Any]], str], console: Console) -> None:
        """`script`: the app. `figures` returns what is printed of a promoted step."""
        self._stack, self._script, self._figures, self._console = stack, script, figures, console
        self._settings = stack.settings
        self._store = Store(connect(stack.settings.database_url))
        self._shown = 0
        self.failed_requests = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self._store.steps(self._settings.project, self._settings.policy)

    @property
    def live(self) -> str:
        """The live version."""
        return self._store.live_name(self._settings)

    def run(self, *options: str, steps: int | None = None) -> dict[str, Any]:
        """Run the app to its end, or until the policy has taken so many steps; return its report."""
        with app(self._stack, self._script, ["--seed", str(self._settings.seed), *options]) as process:
            if steps is not None:
                self.await_steps(steps, process)
                process.terminate()
            report = report_of(process, self._stack)
        self.failed_requests += report["failed_requests"]
        return report

    def learn(self, steps: int, *options: str) -> None:
        """Let the policy train on what the app does, for so many steps."""
        self._store.set_policy_state(self._settings.project, self._settings.policy, "training")
        self.run(*options, steps=steps)
        self._store.set_policy_state(self._settings.project, self._settings.policy, "paused")

    def await_steps(self, count: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """Wait until so many more steps have ended, and print each."""
        due = self._shown + count
        while self._shown < due:
            if process is not None:
                still_runs(process)
            self._stack.watch()
            for step in [step for step in self.steps if step["ended_at"] is not None][self._shown :]:
                line = self._figures(step) if step["state"] == "promoted" else f"{step['state']}: {step['error']}"
                self._console.print(f"step {step['number']}  {line}", highlight=False)
                self._shown += 1
            time.sleep(POLL_S)


def cells(interval: Interval, sign: str = "") -> tuple[str, str]:
    """Return a mean and its interval for a table; `sign`: "+" also where they are positive."""
    return f"{interval.mean:{sign}.1%}", f"{interval.low:{sign}.1%} to {interval.high:{sign}.1%}"
