"""Send a step's figures to TensorBoard and Weights & Biases, where they are configured and installed.

Each package is imported at its first use. No sink can fail a step: the step is over and in SQL when a sink gets it.
"""

import logging
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from trainer.domain.figures import EndedStep
from trainer.errors import SinkMissing

log = logging.getLogger(__name__)


class Sink(Protocol):
    """One destination of figures."""

    def tell(self, step: EndedStep) -> None:
        """Report the step's figures. It may raise any exception."""


class Sinks:
    """The sinks of the setting `trainer.sinks`."""

    def __init__(self, names: Sequence[str], data: Path) -> None:
        self._data = data
        self._wanted = list(names)
        self._open: dict[str, Sink] = {}

    def tell(self, step: EndedStep) -> None:
        """Report the step to each sink. One that fails gets nothing more until the worker restarts."""
        for name in list(self._wanted):
            try:
                if name not in self._open:
                    self._open[name] = MAKERS[name](self._data)
                self._open[name].tell(step)
            except Exception as error:  # every library has its own errors, and none of them may fail a step
                log.error("sink %s gets no more metrics until the next start: %s", name, error)
                self._wanted.remove(name)


def require(names: Sequence[str]) -> None:
    """Check that each sink's package is installed.

    Raises:
        SinkMissing: one is not; the message explains how to install it.
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
        # TensorBoard's own writer, as torch.utils.tensorboard uses it.
        from tensorboard.summary import Writer

        self._writer = Writer
        self._folder = data / "tensorboard"
        self._writers: dict[str, Writer] = {}

    def tell(self, step: EndedStep) -> None:
        """Write one scalar for each figure."""
        if step.policy not in self._writers:
            self._writers[step.policy] = self._writer(str(self._folder / step.policy))
        writer = self._writers[step.policy]
        for name, figure in step.figures.items():
            writer.add_scalar(name, figure, step.number, wall_time=step.ended_at.timestamp())
        writer.flush()


class Wandb:
    """A run for each policy and each start of the worker, in the policy's group.

    `WANDB_…` variables set the destination.
    """

    def __init__(self, data: Path) -> None:
        import wandb

        self._wandb = wandb
        self._folder = None if "WANDB_DIR" in os.environ else str(data)
        self._runs: dict[str, wandb.Run] = {}

    def tell(self, step: EndedStep) -> None:
        """Log one row of figures."""
        if step.policy not in self._runs:
            self._runs[step.policy] = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "whetstone"),
                group=step.policy,
                dir=self._folder,
                reinit="create_new",
            )
        self._runs[step.policy].log(dict(step.figures), step=step.number)


MAKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}
"""Setting -> class of the sink; the setting is also the package's name."""
