"""Record how far a run has come, in its data folder, so that a run that was cut off goes on. The steps are in SQL."""

from pathlib import Path
from typing import Any

import msgspec

from whetstone.config.settings import SettingsError

NAME = "real.json"


class Plan(msgspec.Struct, frozen=True):
    """The parameters of a run."""

    task: str
    seed: int
    shuffle_rewards: bool
    steps: int
    """Policy-gradient steps."""
    lessons: int
    """Supervised steps before them."""
    questions: int
    """Held-out questions to each measured version."""
    model: str
    """Folder or hub name."""
    settings: dict[str, Any]
    """Settings other than the defaults."""


class Measurement(msgspec.Struct, frozen=True):
    """What a version answered to the held-out questions."""

    version: str
    """vLLM's name of it."""
    each: list[int]
    """1 for each question with a right answer, else 0."""
    fields: list[float] = []
    """The share of each answer that is right, where the task has such."""


class Progress(msgspec.Struct):
    """How far a run has come."""

    plan: Plan
    taught: bool = False
    """The rule program's answers are recorded."""
    measured: dict[str, Measurement] = {}
    """By stage."""
    seconds: dict[str, float] = {}
    """Of each stage, as far as it has come, without times at which the stack was down."""
    preferred: list[float] = []
    """For each held-out question, how a judge prefers the last version's answer to the first one's: 0 to 1."""
    failed_requests: int = 0

    def save(self, data: Path) -> None:
        """Write it atomically."""
        path = data / NAME
        new = path.with_suffix(".json.new")
        new.write_bytes(msgspec.json.encode(self))
        new.replace(path)


def begun(data: Path, plan: Plan) -> Progress:
    """Return the progress of the run in this folder, at its beginning where the folder is empty.

    Raises:
        SettingsError: the folder holds something else, or a run with another plan.
    """
    try:
        progress = msgspec.json.decode((data / NAME).read_bytes(), type=Progress)
    except FileNotFoundError:
        if any(data.iterdir()):
            raise SettingsError(
                f"{data} holds something else than a run of `make real`: choose another folder"
            ) from None
        progress = Progress(plan)
        progress.save(data)
    if progress.plan != plan:
        before, now = msgspec.to_builtins(progress.plan), msgspec.to_builtins(plan)
        differ = ", ".join(f"{name} {before[name]}" for name in before if before[name] != now[name])
        raise SettingsError(f"{data} is of a run with {differ}: give the same options, or choose another folder")
    return progress
