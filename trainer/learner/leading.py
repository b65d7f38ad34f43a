"""A learner in every process of a team: the first process takes orders and passes them on, the others follow.

Knows learners and a team; nothing of Celery, SQL or vLLM. All of them hold the same weights bit for bit, so what needs
one learner only (the adapter's files, the probe's logprobs) is asked of the first.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from trainer.errors import TrainerError
from trainer.learner.learner import Learner, StepFigures
from trainer.learner.team import Team
from trainer.rows import Row
from whetstone.training import Kind, TrainerSettings

log = logging.getLogger(__name__)
AnyLearner = TypeVar("AnyLearner", bound=Learner)


@dataclass(frozen=True)
class Fresh:
    """A learner as `Learner.fresh` makes it."""

    model_path: str | Path
    settings: TrainerSettings
    seed: int

    def made(self, kind: type[AnyLearner], team: Team) -> AnyLearner:
        """This process's one."""
        return kind.fresh(self.model_path, self.settings, self.seed, team)


@dataclass(frozen=True)
class Resume:
    """A learner as `Learner.resume` makes it."""

    model_path: str | Path
    adapter_folder: Path
    settings: TrainerSettings

    def made(self, kind: type[AnyLearner], team: Team) -> AnyLearner:
        """This process's one."""
        return kind.resume(self.model_path, self.adapter_folder, self.settings, team)


@dataclass(frozen=True)
class Step:
    """A step as `Learner.step` takes it."""

    rows: tuple[Row, ...]
    version_in: int
    kind: Kind


@dataclass(frozen=True)
class Order:
    """What every process does next."""

    number: int
    """Of the learner that is made or takes the step."""
    living: frozenset[int]
    """Numbers of the learners that the leader still has; the memory of others is needed."""
    what: Fresh | Resume | Step


class Led(Learner):
    """The leader's own learner: a step of it is one of all processes."""

    leader: "Leader"
    number: int

    def step(
        self,
        rows: Sequence[Row],
        version_in: int,
        on_progress: Callable[[int, int], None] | None = None,
        kind: Kind = "grpo",
    ) -> StepFigures:
        """See `Learner.step`; `on_progress` counts rounds, in each of which every process reads a micro-batch.

        After a failure this learner is to be dropped: where one process alone fails in the update, others have moved.
        """
        with self.leader.ordering(self.number, Step(tuple(rows), version_in, kind)):
            return super().step(rows, version_in, on_progress, kind)


class Leader:
    """Makes learners, one in each process of the team; its methods are those of the class `Learner`."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._numbers = count()
        self._living: WeakSet[Led] = WeakSet()

    def fresh(self, model_path: str | Path, settings: TrainerSettings, seed: int) -> Learner:
        """See `Learner.fresh`; raises PeerFailed as well."""
        return self._made(Fresh(model_path, settings, seed))

    def resume(self, model_path: str | Path, adapter_folder: Path, settings: TrainerSettings) -> Learner:
        """See `Learner.resume`; raises PeerFailed as well."""
        return self._made(Resume(model_path, adapter_folder, settings))

    def dismiss(self) -> None:
        """Let the others go. Nothing can be ordered after it."""
        self._team.say(None)

    @contextmanager
    def ordering(self, number: int, what: Fresh | Resume | Step) -> Iterator[None]:
        """Have the others do what this process does inside.

        Raises:
            PeerFailed: one of them could not.
        """
        self._team.say(Order(number, frozenset(learner.number for learner in self._living), what))
        with self._team.together():
            yield

    def _made(self, what: Fresh | Resume) -> Led:
        number = next(self._numbers)
        with self.ordering(number, what):
            learner = what.made(Led, self._team)
        learner.leader, learner.number = self, number
        self._living.add(learner)
        return learner


def follow(team: Team, learners: dict[int, Learner]) -> None:
    """Do what the leader orders until it lets us go. `learners` are what this process holds, by number."""
    order: Order | None
    while (order := team.hear()) is not None:
        for number in learners.keys() - order.living:
            del learners[number]
        try:
            with team.together():
                _do(order, team, learners)
        except Exception as error:  # the leader knows, and says what comes next
            log.warning("not done by all: %s", error, exc_info=not isinstance(error, TrainerError))


def _do(order: Order, team: Team, learners: dict[int, Learner]) -> None:
    what = order.what
    if isinstance(what, Step):
        learners[order.number].step(what.rows, what.version_in, kind=what.kind)
    else:
        learners[order.number] = what.made(Learner, team)
