"""The training worker, `celery -A trainer.tasks worker`: one task at a time. Knows Celery; the step is `step`'s."""

import logging
from datetime import UTC, datetime
from functools import cache

from celery.signals import celeryd_init
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from migrations.database import connect
from trainer import adapter, sinks
from trainer.errors import PeersMissing, SinkMissing
from trainer.figures import EndedStep
from trainer.learner import team
from trainer.replicas import Replicas
from trainer.retention import Sweeper
from trainer.rounds import rounds
from trainer.step import Learners, take_step
from trainer.store import Store
from trainer.store_retention import RetentionStore
from trainer.store_testing import GateTables
from trainer.testing import Gatekeeper
from whetstone.broker import celery_app, sweep_every
from whetstone.settings import Settings, load
from whetstone.tasks import STEP
from whetstone.vllm import Vllm

log = logging.getLogger(__name__)
settings = load()
app = celery_app("trainer", settings)
sweep_every(app, STEP, settings.sweep_s)
learners = Learners(settings)


@cache
def _engine() -> Engine:
    return connect(settings.database_url)


class Project:
    """What the steps of one project are taken with."""

    def __init__(self, own: Settings) -> None:
        self.settings = own
        self.store = Store(_engine(), own.project, own.home)
        self.gatekeeper = Gatekeeper(GateTables(_engine(), own.project), own)
        self.sweeper = Sweeper(RetentionStore(_engine(), own.project, own.home), own)


@cache
def _projects() -> list[Project]:
    return [Project(own) for own in settings.of_projects()]


@cache
def _replicas() -> Replicas:
    return Replicas({url: Vllm(url) for url in settings.vllm.urls})


@cache
def _sinks() -> sinks.Sinks:
    return sinks.Sinks(settings.trainer.sinks, settings.data.resolve())


def _ended(project: Project, policy: str) -> EndedStep | None:
    """The last step that is over; not looked for where no sink wants it."""
    return project.store.ended(policy) if settings.trainer.sinks else None


def _tell(project: Project, policy: str, before: EndedStep | None) -> None:
    """Tell the sinks of the last step that is over if that was not so before."""
    ended = _ended(project, policy)
    if ended is not None and ended != before:
        _sinks().tell(ended)


@celeryd_init.connect
def _prepare(**_: object) -> None:
    try:
        team.require(settings.trainer)
        sinks.require(settings.trainer.sinks)
    except (PeersMissing, SinkMissing) as error:
        # Celery would log an exception of a signal's receiver and go on.
        raise SystemExit(str(error)) from error
    if not settings.vllm.urls:
        raise SystemExit(
            "vllm.urls names no server: what is trained is loaded on vLLM and probed there. `whetstone up` starts a "
            "worker that knows its servers; for one of your own set WHETSTONE_VLLM__URLS"
        )
    adapter.sweep(settings.data.resolve() / "adapters")


@app.task(name=STEP)
def step() -> None:
    """Go on with candidates that are in tests, remove old adapters, take every step that is due."""
    try:
        # No two projects have a policy of the same name.
        of = {policy: project for project in _projects() for policy in project.store.policies()}
        rounds(sorted(of), lambda policy: _go_on(of[policy], policy), _tidy, lambda policy: _take(of[policy], policy))
    except DBAPIError as error:
        # A step in the middle is taken over when its lease ends.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())


def _go_on(project: Project, policy: str) -> None:
    before = _ended(project, policy)
    project.gatekeeper.go_on(policy, datetime.now(UTC))
    _tell(project, policy, before)


def _tidy() -> None:
    for project in _projects():
        project.sweeper.go_on(datetime.now(UTC))


def _take(project: Project, policy: str) -> bool:
    before = _ended(project, policy)
    taken = take_step(policy, project.store, learners, _replicas(), project.settings)
    # A claim ends steps too: those that nothing was there for, and those given up.
    _tell(project, policy, before)
    return taken
