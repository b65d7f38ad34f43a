"""Where a step's figures go besides SQL: TensorBoard and Weights & Biases, where they are wanted and installed.

Each is imported when it is first told something. None can fail a step: what it is told is over and in SQL by then.
"""

import logging
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from trainer.errors import SinkMissing
from trainer.figures import EndedStep

log = logging.getLogger(__name__)


class Sink(Protocol):
    """One of them."""

    def tell(self, step: EndedStep) -> None:
        """Take in the step's figures. It may raise whatever it likes."""


class Sinks:
    """Those of the setting `trainer.sinks`."""

    def __init__(self, names: Sequence[str], data: Path) -> None:
        self._data = data
        self._wanted = list(names)
        self._open: dict[str, Sink] = {}

    def tell(self, step: EndedStep) -> None:
        """Tell each of them. One that fails is told nothing more until the worker starts anew."""
        for name in list(self._wanted):
            try:
                if name not in self._open:
                    self._open[name] = MAKERS[name](self._data)
                self._open[name].tell(step)
            except Exception as error:  # there are as many errors as libraries, and no step is to fail for one
                log.error("sink %s is told nothing more until the next start: %s", name, error)
                self._wanted.remove(name)


def require(names: Sequence[str]) -> None:
    """Raise unless each of them is installed.

    Raises:
        SinkMissing: one is not; the message says how to mend that.
    """
    for name in names:
        if find_spec(name) is None:
            raise SinkMissing(
                f"setting trainer.sinks has {name!r}, and its package is not installed: `pip install {name}` into the "
                "environment of the training worker, or take it out"
            )


class TensorBoard:
    """Event files under `<data>/tensorboard/<policy>`: `tensorboard --logdir <data>/tensorboard` shows them."""

    def __init__(self, data: Path) -> None:
        # Its own writer, as torch.utils.tensorboard uses it.
        from tensorboard.summary import Writer

        self._writer = Writer
        self._folder = data / "tensorboard"
        self._writers: dict[str, Writer] = {}

    def tell(self, step: EndedStep) -> None:
        """One scalar for each figure."""
        if step.policy not in self._writers:
            self._writers[step.policy] = self._writer(str(self._folder / step.policy))
        writer = self._writers[step.policy]
        for name, figure in step.figures.items():
            writer.add_scalar(name, figure, step.number, wall_time=step.ended_at.timestamp())
        writer.flush()


class Wandb:
    """A run for each policy and each start of the worker, in the group of the policy. `WANDB_…` says where it goes."""

    def __init__(self, data: Path) -> None:
        import wandb

        self._wandb = wandb
        self._folder = None if "WANDB_DIR" in os.environ else str(data)
        self._runs: dict[str, wandb.Run] = {}

    def tell(self, step: EndedStep) -> None:
        """One row of its figures."""
        if step.policy not in self._runs:
            self._runs[step.policy] = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "whetstone"),
                group=step.policy,
                dir=self._folder,
                reinit="create_new",
            )
        self._runs[step.policy].log(dict(step.figures), step=step.number)


MAKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}
"""Setting -> what makes it; each is also its package's name."""
