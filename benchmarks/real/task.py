"""A task on which `benchmarks.real` trains a model: an app with training and eval splits, and how it is trained.

An app takes `--base-url`, `--model`, `--seed`, `--questions`, `--split` and `--shuffle-rewards`; its last line is a
JSON object with `failed_requests`, and with `--split eval` with `each`, a 0 or 1 for each question, and maybe `fields`,
the share of each answer that is right.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fakes.teacher import Rule
from benchmarks.kit.process import ROOT

EXAMPLES = ROOT / "examples"
DEMONSTRATIONS = 64
"""Answers of the rule program that a task's supervised steps imitate, the same for every seed."""
DEMONSTRATION_SEED = 64
MICRO_BATCH_TOKENS = 1024
"""On a CPU: activations take about 2 MB a token, with the default 6 GB, which a small machine lacks beside vLLM."""


@dataclass(frozen=True)
class Lessons:
    """Supervised steps before rewards: a rule program answers, as another server, and the policy imitates it."""

    rule: Rule
    steps: int
    questions: int
    """To the rule program: as many as give DEMONSTRATIONS right answers. These, with reward 1, are imitated."""
    compare: bool = True
    """Whether to measure, for comparison, equally long supervised training without rewards."""


@dataclass(frozen=True)
class Task:
    """One task."""

    name: str
    app: Path
    right: str
    """What a 1 in `each` is, for tables."""
    steps: int
    """Policy-gradient steps."""
    pause_s: float
    """Rest of each of the app's connections between two questions in training. Without it the app would ask more than a
    step can take, and take the trainer's CPU."""
    minutes: float = math.inf
    """Most minutes of policy-gradient steps; then the version that is live counts. Once nearly all groups are uniform,
    a step waits long for others."""
    training: tuple[str, ...] = ()
    """More options of the app in training."""
    lessons: Lessons | None = None
    fields: str = ""
    """What `fields` are, for tables."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the defaults."""
    decays: bool = False
    """Whether the learning rate falls over all policy-gradient steps."""
    judge: Path | None = None
    """A file whose function `scores` judges the groups in training, as another server; the app posts no rewards."""
    compares: bool = False
    """Whether the judge also compares answers of the last version with the first one's: `--against`, `--judge-url`."""
    model: Path | None = None
    """Folder of the model that is trained; None: SmolLM2-135M-Instruct."""
    options: tuple[str, ...] = ()
    """Options that the app always gets with this model."""
    full: tuple[str, ...] = ()
    """In their place, those for any other model."""
    python: Path | None = None
    """The environment's interpreter that runs the app; None: this one."""

    def training_options(self, shuffle_rewards: bool) -> list[str]:
        """Return the app's options in training.

        With shuffled rewards hardly a group has equal ones, and a step takes up to twice as many: half as many
        questions, or the others would be stale.
        """
        rest = ["--pause-s", str(self.pause_s * (2 if shuffle_rewards else 1))]
        return [*self.training, *rest, *(["--shuffle-rewards"] if shuffle_rewards else [])]

    def is_for(self, model: str) -> bool:
        """Return whether `options` and `settings` are for this model, and not `full` and the defaults."""
        return self.model is None or Path(model) == self.model
