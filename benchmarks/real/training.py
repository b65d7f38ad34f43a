"""Take a task's stages on a running stack: lessons, rewards, and where the task wants it more lessons for as long.

Each stage goes on where a run that was cut off has stopped: steps are counted in SQL, seconds and what was measured in
the data folder.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.learning.policy import LearningPolicy
from benchmarks.real.progress import Measurement, Progress
from benchmarks.real.servers import TEACHER
from benchmarks.real.task import DEMONSTRATION_SEED, DEMONSTRATIONS, Lessons, Task
from whetstone.demo import curve

BEFORE, AFTER, LESSONS_ALONE = "before", "after", "lessons alone"
"""What is measured: before rewards, after them, and what as many minutes of more lessons give."""
CONNECTIONS = "32"
"""Held-out questions in flight at once."""
CURVE_EVERY = 5
"""Steps between two curves."""
ENOUGH_ATTEMPTS = 16
"""Fewest attempts for a version's mean."""


class Training:
    """The stages of one run."""

    def __init__(
        self,
        policy: LearningPolicy,
        task: Task,
        progress: Progress,
        data: Path,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        judge_url: str = "",
    ) -> None:
        """`data`: the folder in which the progress is recorded. `clock` returns seconds. `judge_url`: of the judge that
        compares versions, for a task that has one."""
        self._judge_url = judge_url
        self.policy, self.task, self._progress = policy, task, progress
        self._data, self._console, self._clock = data, console, clock
        self._plan = progress.plan
        self._stage, self._mark = "", clock()
        self._failed_before = progress.failed_requests
        policy.after_step = self._after_step

    def run(self) -> None:
        """Take what is left of all stages.

        Raises:
            AppFailed: the app ended early.
            RefusedByProxy: the proxy refuses a supervised step.
            StartFailed: a part of the stack dies repeatedly.
        """
        lessons = self.task.lessons
        if lessons is not None:
            self._be_taught(lessons)
        self._measure(BEFORE)
        left = self._plan.steps - len(self.taken("grpo"))
        seconds = 60 * self.task.minutes - self._progress.seconds.get(AFTER, 0.0)
        if left > 0 and seconds > 0 and AFTER not in self._progress.measured:
            with self._timed(AFTER):
                options = self.task.training_options(self._plan.shuffle_rewards)
                self.policy.learn(left, "--questions", "0", *options, seconds=seconds)
        self._measure(AFTER)
        if self.task.compares and not self._progress.preferred:
            self._compare()
        is_due = lessons is not None and lessons.compare and not self._plan.shuffle_rewards
        if is_due and LESSONS_ALONE not in self._progress.measured:
            self._imitate_as_long()
            self._measure(LESSONS_ALONE)

    def taken(self, kind: str) -> list[dict[str, Any]]:
        """Return the steps of this kind that have ended."""
        return [step for step in self.policy.ended if step["kind"] == kind]

    def curve(self) -> list[tuple[int, float, int]]:
        """Return version, mean reward in training and number of attempts, of versions with enough attempts."""
        rewards = sorted(self.policy.rewards.items())
        return [(version, r.mean, r.trajectories) for version, r in rewards if r.trajectories >= ENOUGH_ATTEMPTS]

    def show_curve(self) -> None:
        """Print the curve of rewards in training by version."""
        lines = curve.in_text([mean for _, mean, _ in self.curve()], self._console.width)
        self._console.print(*lines, sep="\n", highlight=False)

    def _be_taught(self, lessons: Lessons) -> None:
        """Record the demonstrations, and take the supervised steps on them."""
        if not self._progress.taught:
            options = ("--questions", str(lessons.questions), "--seed", str(DEMONSTRATION_SEED), "--attempts", "1")
            self.policy.run("--model", TEACHER, *options)
            self.policy.await_rewarded(TEACHER, lessons.questions)
            self._progress.taught = True
            self._save()
        with self._timed(BEFORE):
            while not self.taken("grpo") and len(self.taken("sft")) < self._plan.lessons:
                self._imitate()

    def _imitate_as_long(self) -> None:
        """From the version before rewards, take supervised steps for as long as rewards took."""
        if LESSONS_ALONE not in self._progress.seconds:
            before = self._progress.measured[BEFORE].version
            self.policy.promote(int(before.rpartition("@v")[2]))
        with self._timed(LESSONS_ALONE):
            while self._progress.seconds[LESSONS_ALONE] < self._progress.seconds[AFTER]:
                self._imitate()

    def _imitate(self) -> None:
        self.policy.imitate(TEACHER, min_reward=1.0, limit=DEMONSTRATIONS)

    def _measure(self, stage: str) -> None:
        """Send the held-out questions to the live version, unless that is done."""
        if stage in self._progress.measured:
            return
        version = self.policy.live
        self._console.print(f"[dim]{self._plan.questions} held-out questions to {version}[/dim]")
        options = ("--questions", str(self._plan.questions), "--model", version, "--connections", CONNECTIONS)
        answers = self.policy.run("--split", "eval", *options)
        self._progress.measured[stage] = Measurement(version, answers["each"], answers.get("fields", []))
        self._save()

    def _compare(self) -> None:
        """Let the judge compare answers of the version after rewards with those of the one before."""
        before, after = (self._progress.measured[stage].version for stage in (BEFORE, AFTER))
        self._console.print(f"[dim]{self._plan.questions} answers of {after} against those of {before}[/dim]")
        versions = ("--model", after, "--against", before, "--judge-url", self._judge_url)
        answers = self.policy.run("--split", "eval", "--questions", str(self._plan.questions), *versions)
        self._progress.preferred = answers["fields"]
        self._save()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        self._stage, self._mark = stage, self._clock()
        self._progress.seconds.setdefault(stage, 0.0)
        try:
            yield
        finally:
            self._save()
            self._stage = ""

    def _after_step(self) -> None:
        self._save()
        if self._stage == AFTER and len(self.taken("grpo")) % CURVE_EVERY == 0:
            self.show_curve()

    def _save(self) -> None:
        """Write the progress, with the stage's seconds up to now."""
        now = self._clock()
        if self._stage:
            self._progress.seconds[self._stage] += now - self._mark
        self._mark = now
        self._progress.failed_requests = self._failed_before + self.policy.failed_requests
        self._progress.save(self._data)


def line_of(step: dict[str, Any]) -> str:
    """Return what is printed of a promoted step."""
    if step["kind"] == "sft":
        return f"imitates {step['completions']} answers  loss {step['loss']:.3f}  {step['seconds']:.1f} s"
    # Not measured where no token came from the version that the step began from.
    k3 = "-" if step["mismatch_k3"] is None else f"{step['mismatch_k3']:.1e}"
    return (
        f"{step['trajectories']} attempts  reward {step['reward_mean']:.3f}  kl {step['kl']:.4f}  k3 {k3}  "
        f"{step['seconds']:.1f} s"
    )
