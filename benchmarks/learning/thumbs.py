"""Check that a policy learns from thumbs alone: single turns, three in ten with a thumb, baselines and no groups.

Starts the whole stack, runs examples/thumbs/app.py until the policy has taken its steps, then sends the held-out
questions to the version before and to the last one. Exit 0 only if the share of liked answers rose by 15 points or
more, with certainty; with --shuffle-rewards, where thumbs mean nothing, only if it did not rise. Loopback only.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT, add_vllm_argument, borrowed_vllm
from benchmarks.learning.policy import LearningPolicy, cells
from whetstone.config.settings import Settings, load
from whetstone.domain import stats
from whetstone.stack.stack import running

APP = ROOT / "examples" / "thumbs" / "app.py"
SINGLES_PER_STEP, LEARNING_RATE = 192, 5e-4
"""Settings of the run: twice the thumbs and half the rate of the defaults. AdamW walks as far on noise as on a signal;
with the defaults, shuffled thumbs moved a policy by 11 points.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    before: stats.Interval
    after: stats.Interval
    gain: stats.Interval
    trajectories: int
    """Trajectories taken by steps."""
    baselined: int
    """How many of these were compared with a baseline."""
    failed_requests: int

    def learned(self, enough: float) -> bool:
        """Return whether the gain is at least that share, and certain; always true where `enough` is below 0."""
        return enough < 0 or (self.gain.mean >= enough and self.gain.low > 0)

    @property
    def clean(self) -> bool:
        """Whether no trajectory was compared with a group, and no request failed."""
        return self.trajectories == self.baselined and not self.failed_requests


def settings_of(data: Path, seed: int, singles_per_step: int, **given: Any) -> Settings:
    """Return settings of a stack without grouping by prompt, so that every trajectory stays alone."""
    return load(
        environment={},
        data=data,
        seed=seed,
        proxy__port=0,
        groups__prompt_window_s=0,
        trainer__singles_per_step=singles_per_step,
        trainer__learning_rate=LEARNING_RATE,
        **given,
    )


def run(settings: Settings, steps: int, questions: int, *, shuffle: bool, console: Console) -> Outcome:
    """Start the stack, train, measure, stop.

    Raises:
        SettingsError, StartFailed: the stack does not come up.
        AppFailed: the app ended early.
    """
    with running(settings, lambda text: console.print(f"[dim]{text}[/dim]")) as stack:
        policy = LearningPolicy(stack, APP, _figures, console)
        policy.learn(steps, "--questions", "0", *(["--shuffle-rewards"] if shuffle else []))
        versions = settings.served_name, policy.live
        console.print(f"[dim]{questions} held-out questions to {' and to '.join(versions)}[/dim]")
        before, after = (
            policy.run("--split", "eval", "--questions", str(questions), "--model", name)["each"] for name in versions
        )
        taken = policy.steps
    return Outcome(
        before=stats.share(before),
        after=stats.share(after),
        gain=stats.gain(before, after),
        trajectories=sum(step["trajectories"] for step in taken),
        baselined=sum(step["baselined"] for step in taken),
        failed_requests=policy.failed_requests,
    )


def _figures(step: dict[str, Any]) -> str:
    return (
        f"{step['baselined']} of {step['trajectories']} by baseline  "
        f"thumbs up {step['reward_mean']:.3f}  kl {step['kl']:.3f}  {step['seconds']:.1f} s"
    )


def main() -> int:
    parser = parser_of(
        "Whether a policy learns from thumbs on single answers.",
        {
            "--steps": {"type": int, "default": 20, "help": "steps to take"},
            "--singles": {"type": int, "default": SINGLES_PER_STEP, "help": "answers with a thumb in a step"},
            "--questions": {"type": int, "default": 600, "help": "held-out questions to each of the two versions"},
            "--objective": {
                "choices": ("grpo", "kto"),
                "default": "grpo",
                "help": "what a step makes of thumbs: compare each with its baseline, or KTO",
            },
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the questions"},
            "--enough": {
                "type": float,
                "default": 0.15,
                "help": "the gain, as a share, that counts as learned; below 0: any",
            },
            "--shuffle-rewards": {"action": "store_true", "help": "the control: thumbs of other answers"},
            "--data": {"type": Path, "help": "an empty folder for database and logs, which then stay"},
        },
    )
    add_vllm_argument(parser)
    args = parser.parse_args()
    with opened("thumbs", args.data, width=None) as (data, console), borrowed_vllm(args.vllm) as given:
        settings = settings_of(data, args.seed, args.singles, trainer__objective=args.objective, **given)
        began = time.monotonic()
        outcome = run(settings, args.steps, args.questions, shuffle=args.shuffle_rewards, console=console)
    table = Table("held-out questions", "liked", "95 % interval", title=f"{args.questions} boards, the same for both")
    table.add_row("before", *cells(outcome.before))
    table.add_row("after", *cells(outcome.after))
    table.add_row("gain", *cells(outcome.gain, "+"))
    console.print(table)
    console.print(
        f"{outcome.baselined} of {outcome.trajectories} trajectories compared with a baseline, "
        f"{outcome.failed_requests} failed requests"
    )
    console.print(f"{time.monotonic() - began:.0f} s")
    as_due = outcome.gain.low <= 0 if args.shuffle_rewards else outcome.learned(args.enough)
    return 0 if outcome.clean and as_due else 1


if __name__ == "__main__":
    sys.exit(main())
