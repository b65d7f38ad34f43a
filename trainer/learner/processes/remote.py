"""Run one learner in every process of a team: the first process leads and passes its orders on, the others follow.

All processes hold the same weights bit for bit, so what needs only one learner (the adapter's files, the probe's
logprobs) is requested from the first.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from trainer.domain.figures import StepFigures
from trainer.domain.rows import Row
from trainer.errors import TrainerError
from trainer.learner.learner import Learner
from trainer.learner.processes.team import Team
from whetstone.config.trainer import Kind, TrainerSettings

log = logging.getLogger(__name__)
AnyLearner = TypeVar("AnyLearner", bound=Learner)


@dataclass(frozen=True)
class Fresh:
    """An order to make a learner by `Learner.fresh`."""

    model_path: str | Path
    settings: TrainerSettings
    seed: int

    def made(self, kind: type[AnyLearner], team: Team) -> AnyLearner:
        """Make this process's learner."""
        return kind.fresh(self.model_path, self.settings, self.seed, team)


@dataclass(frozen=True)
class Resume:
    """An order to make a learner by `Learner.resume`."""

    model_path: str | Path
    adapter_folder: Path
    settings: TrainerSettings

    def made(self, kind: type[AnyLearner], team: Team) -> AnyLearner:
        """Make this process's learner."""
        return kind.resume(self.model_path, self.adapter_folder, self.settings, team)


@dataclass(frozen=True)
class Step:
    """An order to take a step by `Learner.step`."""

    rows: tuple[Row, ...]
    version_in: int
    kind: Kind
    reference: Path | None


@dataclass(frozen=True)
class Accompany:
    """An order to take part in a forward pass that the leader alone needs, since the base is sharded."""


@dataclass(frozen=True)
class Command:
    """What every process does next."""

    number: int
    """Number of the learner that is made or takes the step."""
    living: frozenset[int]
    """Numbers of the learners that the leader still has; the others free the memory of the rest."""
    what: Fresh | Resume | Step | Accompany


class RemoteLearner(Learner):
    """The leader's own learner. Its step is a step of all processes."""

    leader: "Leader"
    number: int

    def step(
        self,
        rows: Sequence[Row],
        version_in: int,
        on_progress: Callable[[int, int], None] | None = None,
        kind: Kind = "grpo",
        reference: Path | None = None,
    ) -> StepFigures:
        """See `Learner.step`; `on_progress` counts rounds, in each of which every process reads a micro-batch.

        Drop this learner after a failure: where a single process fails in the update, others have moved.
        """
        with self.leader.ordering(self.number, Step(tuple(rows), version_in, kind, reference)):
            return super().step(rows, version_in, on_progress, kind, reference)


class Leader:
    """Makes learners, one in each process of the team. Its methods are those of the class `Learner`."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._numbers = count()
        self._living: WeakSet[RemoteLearner] = WeakSet()
        self._orders = 0
        """How many orders are being carried out."""

    def fresh(self, model_path: str | Path, settings: TrainerSettings, seed: int) -> Learner:
        """See `Learner.fresh`; raises PeerFailed as well."""
        return self._made(Fresh(model_path, settings, seed))

    def resume(self, model_path: str | Path, adapter_folder: Path, settings: TrainerSettings) -> Learner:
        """See `Learner.resume`; raises PeerFailed as well."""
        return self._made(Resume(model_path, adapter_folder, settings))

    def dismiss(self) -> None:
        """Release the followers. No order is possible after it."""
        self._team.say(None)

    @contextmanager
    def ordering(self, number: int, what: Fresh | Resume | Step) -> Iterator[None]:
        """Make the followers do what this process does inside the context.

        Raises:
            PeerFailed: one of them failed.
        """
        self._say(number, what)
        self._orders += 1
        try:
            with self._team.together():
                yield
        finally:
            self._orders -= 1

    def accompanied(self, number: int) -> None:
        """Make the followers take part in the pass that begins now, unless they are in a step with this process."""
        if not self._orders:
            self._say(number, Accompany())

    def _say(self, number: int, what: Fresh | Resume | Step | Accompany) -> None:
        self._team.say(Command(number, frozenset(learner.number for learner in self._living), what))

    def _made(self, what: Fresh | Resume) -> RemoteLearner:
        number = next(self._numbers)
        with self.ordering(number, what):
            learner = what.made(RemoteLearner, self._team)
        learner.leader, learner.number = self, number
        learner.before_passes(partial(self.accompanied, number))
        self._living.add(learner)
        return learner


def follow(team: Team, learners: dict[int, Learner]) -> None:
    """Carry out the leader's orders until it releases us. `learners`: this process's learners, by number."""
    order: Command | None
    while (order := team.hear()) is not None:
        for number in learners.keys() - order.living:
            del learners[number]
        if isinstance(order.what, Accompany):
            learners[order.number].accompany()  # where it fails, this process ends
            continue
        try:
            with team.together():
                _do(order, team, learners)
        except Exception as error:  # the leader gets the error too, and decides what comes next
            log.warning("not done by all: %s", error, exc_info=not isinstance(error, TrainerError))


def _do(order: Command, team: Team, learners: dict[int, Learner]) -> None:
    what = order.what
    if isinstance(what, Step):
        learners[order.number].step(what.rows, what.version_in, kind=what.kind, reference=what.reference)
    elif not isinstance(what, Accompany):
        learners[order.number] = what.made(Learner, team)
