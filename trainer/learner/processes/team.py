"""Connect several processes that take one step together, over accelerate.

Each process has a device of its own, with the whole base model on it or a share of that (`learner.sharded`). Two kinds
of data are exchanged: figures and objects over gloo, which waits for days without a timeout and without a busy core,
and gradients over what connects the devices (nccl, gloo). No process starts to add up before all have confirmed that
they can, so that no process waits for one that has failed.

All processes run on one machine, launched by `accelerate launch`. They exchange pickles, over loopback.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed import all_reduce

from trainer.errors import OutOfMemory, PeerFailed, PeerOutOfMemory, PeersMissing
from trainer.learner.backends import device_of
from trainer.learner.processes.collective import Plan, Value
from whetstone.config.trainer import TrainerSettings

log = logging.getLogger(__name__)

IDLE = timedelta(days=365)
"""How long one process waits for another. A dead process is noticed earlier: its connections close."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class _Failure:
    """What a process that failed gives the others instead of its value."""

    why: str
    out_of_memory: bool


class Team:
    """This process among those of its launch; the first one leads. See `collective.Collective` for the interface."""

    def __init__(self, settings: TrainerSettings) -> None:
        """Connect to the others; all of them call this.

        Raises:
            PeersMissing: there are not `processes` of them, or fewer devices than that.
        """
        require(settings)
        device = _device(settings)
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self._state = PartialState(cpu=device.type == "cpu", backend=backend, timeout=IDLE)
        self.rank: int = self._state.process_index
        self.size: int = self._state.num_processes
        # The first sum sets up connections between devices: do it now, not in the middle of a step.
        with self._reaching():
            all_reduce(torch.zeros(1, device=self._state.device))

    @property
    def leads(self) -> bool:
        """Whether this is the process that the others follow."""
        return self.rank == 0

    def say(self, order: object) -> None:
        """Send the order to all others; they must be waiting in `hear`."""
        with self._reaching():
            broadcast_object_list([order])

    def hear(self) -> Any:
        """Wait for the leading process's next order and return it."""
        received: list[Any] = [None]
        with self._reaching():
            broadcast_object_list(received)
        return received[0]

    def share(self, plan: Plan, tokens: Callable[[list[int]], int]) -> Plan:
        """Deal out the micro-batches in turn, the most expensive first: no two processes differ by more than one."""
        dealt = sorted(plan, key=lambda places: -tokens(places))
        rounds = [dealt[place : place + self.size] for place in range(0, len(dealt), self.size)]
        return [parts[self.rank] if self.rank < len(parts) else [] for parts in rounds]

    def exchange(self, value: Value) -> list[Value]:
        """Return the values of all processes by rank.

        Raises:
            PeerFailed: another process has failed since.
        """
        with self._reaching():
            answers: list[Value | _Failure] = gather_object([value])
        failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, _Failure)}
        if failures and self.rank not in failures:
            kind = PeerOutOfMemory if all(one.out_of_memory for one in failures.values()) else PeerFailed
            raise kind("; ".join(f"process {rank}: {failure.why}" for rank, failure in failures.items()))
        return cast(list[Value], answers)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wrap what all processes do on one order: at its end each process has the result of all.

        Raises:
            PeerFailed: another process failed; its error is in its own log, and in the message.
        """
        try:
            yield
        except PeerFailed:
            raise  # all processes know already
        except BaseException as error:
            failure = _Failure(f"{type(error).__name__}: {error}", isinstance(error, OutOfMemory))
            self.exchange(failure)
            raise
        self.exchange(None)

    def add_up(self, weights: Sequence[Tensor], figures: Sequence[float]) -> list[float]:
        """Make each weight's gradient the sum over all processes; None where no process has one.

        Return the sums of the figures.

        Every process ends up with the same bits: each sum is computed once and sent to all.

        Raises:
            PeerFailed: another process has failed; no gradient was changed.
        """
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        known = weights[0].new_tensor([float(weight.grad is not None) for weight in weights])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), known])
        totals = torch.tensor(figures, dtype=torch.float64)
        self.exchange(None)
        with self._reaching():
            all_reduce(flat)
            all_reduce(totals)
        *summed, known = flat.split([*(weight.numel() for weight in weights), len(weights)])
        for weight, gradient, anywhere in zip(weights, summed, known.tolist(), strict=True):
            weight.grad = gradient.view_as(weight) if anywhere else None
        return list(totals.tolist())

    def leave(self) -> None:
        """Close the connections."""
        self._state.destroy_process_group()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """End this process where the others cannot be reached: it no longer knows which weights they hold."""
        try:
            yield
        except RuntimeError as error:
            log.critical("this process ends, for the others are gone: %s", error)
            # At once: Celery treats a SystemExit in a task as an error of the task, and nothing here needs a cleanup.
            os._exit(1)


def require(settings: TrainerSettings) -> None:
    """Raise PeersMissing unless this process was launched as one of as many as the settings require."""
    wanted = settings.processes
    launched = {int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if wanted > 1 and launched != {wanted}:
        raise PeersMissing(
            f"trainer.processes is {wanted}, and this worker was launched as {max(launched)}: start it with `whetstone "
            f"up`, or with `accelerate launch --multi_gpu --num_processes {wanted} --num_machines 1 "
            "--main_process_port 0 -m trainer.team worker --queues trainer --pool solo`"
        )


def _device(settings: TrainerSettings) -> torch.device:
    """Return the kind of device; each process has one.

    Raises:
        PeersMissing: there are fewer devices than processes.
    """
    device, wanted = device_of(settings), settings.processes
    there = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device.type, wanted)
    if there < wanted:
        raise PeersMissing(
            f"trainer.processes is {wanted}, and there are {there} {device.type} devices: set it to that"
        )
    return device
