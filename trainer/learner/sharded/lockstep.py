"""Keep the forward and backward passes of all processes equal in number, where the base is sharded.

Each layer of a pass is gathered from all processes, so a process that has nothing to read still has to take part: it
reads a row of two tokens and drops the result. Before a pass all processes confirm that they can begin it. What fails
in the middle of a pass ends the process, and with it the launch, since the others wait for its layers: the step is
taken over as after any death.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainer.domain.rows import Row
from trainer.errors import TrainerError
from trainer.learner.gradient.memory import ran_out
from trainer.learner.processes.collective import Collective

log = logging.getLogger(__name__)

COMPANY = Row(
    trajectory_id="",
    token_ids_T=(0, 0),
    sampled_T=(False, True),
    inference_logprobs_T=(float("nan"), -1.0),
    versions_T=(-1, 0),
    temperatures_T=(1.0, 1.0),
    advantages_T=(0.0, 0.0),
)
"""What a process reads that has nothing to read."""


class Free:
    """The passes of a process that holds the whole base: none waits for another."""

    is_sharded = False

    def __init__(self) -> None:
        self.announce: Callable[[], None] = lambda: None
        """Called before each pass of a sharded base: the leader calls the others to it, where they are in no step."""

    def anyone(self, wants: bool) -> bool:
        """Return whether any process wants to run a pass now; here, this one."""
        return wants

    def most(self, count: int) -> int:
        """Return the largest count of all processes; here, this one's."""
        return count

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Wrap a pass."""
        yield


class Lockstep(Free):
    """The passes of a process that holds a share of the base."""

    is_sharded = True

    def __init__(self, peers: Collective) -> None:
        super().__init__()
        self._peers = peers

    def anyone(self, wants: bool) -> bool:
        """Return whether any process wants to run a pass now. Raises PeerFailed where one cannot."""
        return any(self._peers.exchange(wants))

    def most(self, count: int) -> int:
        """Return the largest count of all processes. Raises PeerFailed where one has failed."""
        return max(self._peers.exchange(count))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Wrap a pass: end this process where it fails, unless it fails in all processes alike."""
        self.announce()
        try:
            yield
        except Exception as error:
            if isinstance(error, TrainerError) and not ran_out(error):
                raise
            log.critical(
                "this process ends in the middle of a pass, for which the others wait: %s. Where memory ran out, set "
                "trainer.micro_batch_tokens lower, or trainer.processes higher",
                error, exc_info=not ran_out(error),
            )  # fmt: skip
            # At once, and not by an exception: the others notice it by their closed connections.
            os._exit(1)
