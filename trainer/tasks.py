"""The training worker, `celery -A trainer.tasks worker`: one task at a time. `trainer.step.step` takes the steps."""

import logging
import threading
from datetime import UTC, datetime
from functools import cache

from celery.signals import celeryd_init
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from trainer.adapters import files
from trainer.adapters.retention import Sweeper
from trainer.domain.figures import EndedStep
from trainer.errors import PeersMissing, SinkMissing
from trainer.gate.controller import GateController
from trainer.gate.handover import HandoverController
from trainer.learner.processes import team
from trainer.step import metric_sinks
from trainer.step.learners import Learners
from trainer.step.schedule import rounds
from trainer.step.step import take_step
from trainer.store.gate_tests import GateTables
from trainer.store.handover import HandoverTables
from trainer.store.retention import ManifestStore, RetentionStore
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.messaging.celery_app import celery_app, sweep_every
from whetstone.messaging.task_names import STEP
from whetstone.registry.remote.object_store import store_of
from whetstone.registry.remote.sources import source_of
from whetstone.vllm.client import Vllm

log = logging.getLogger(__name__)
settings = load()
app = celery_app("trainer", settings)
sweep_every(app, STEP, settings.sweep_s)
learners = Learners(settings)
_telling = threading.Lock()
"""Steps of several policies may end at the same time, and not every sink can be written to from two threads."""


@cache
def _engine() -> Engine:
    return connect(settings.database_url)


class Project:
    """The objects that take the steps of one project."""

    def __init__(self, own: Settings) -> None:
        self.settings = own
        self.store = Store(_engine(), own.project, own.home)
        self.gatekeeper = GateController(GateTables(_engine(), own.project), own)
        self.handovers = HandoverController(HandoverTables(_engine(), own.project), own)
        # An adapter store is one for all projects.
        manifests = ManifestStore(_engine()) if own.project == own.home else None
        self.sweeper = Sweeper(RetentionStore(_engine(), own.project, own.home), own, manifests)


@cache
def _projects() -> list[Project]:
    return [Project(own) for own in settings.of_projects()]


@cache
def _replicas() -> Replicas:
    # Where all machines see the folder, vLLM checks what it loads by itself.
    source = source_of(settings.data, settings.adapters) if settings.adapters.is_remote else None
    return Replicas({url: Vllm(url) for url in settings.vllm.urls}, source)


@cache
def _sinks() -> metric_sinks.Sinks:
    return metric_sinks.Sinks(settings.trainer.sinks, settings.data.resolve())


def _ended(project: Project, policy: str) -> EndedStep | None:
    """Return the last step that is over; not read where no sink needs it."""
    return project.store.ended(policy) if settings.trainer.sinks else None


def _tell(project: Project, policy: str, before: EndedStep | None) -> None:
    """Report the last ended step to the sinks, if it has ended since `before`."""
    ended = _ended(project, policy)
    if ended is not None and ended != before:
        with _telling:
            _sinks().tell(ended)


@celeryd_init.connect
def _prepare(**_: object) -> None:
    try:
        team.require(settings.trainer)
        metric_sinks.require(settings.trainer.sinks)
        store_of(settings.adapters)
    except (PeersMissing, SinkMissing, SettingsError) as error:
        # Celery would log an exception of a signal's receiver and continue.
        raise SystemExit(str(error)) from error
    if not settings.vllm.urls:
        raise SystemExit(
            "vllm.urls names no server: what is trained is loaded on vLLM and probed there. `whetstone up` starts a "
            "worker that knows its servers; for one of your own set WHETSTONE_VLLM__URLS"
        )
    files.sweep(settings.data.resolve() / "adapters")


@app.task(name=STEP)
def step() -> None:
    """Continue candidates that are in tests, remove old adapters, take every step that is due."""
    try:
        # No two projects have a policy of the same name.
        of = {policy: project for project in _projects() for policy in project.store.policies()}
        rounds(
            sorted(of),
            lambda policy: _go_on(of[policy], policy),
            _tidy,
            lambda policy: _take(of[policy], policy),
            settings.trainer.policies_at_once,
        )
    except DBAPIError as error:
        # An interrupted step is taken over when its lease ends.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())


def _go_on(project: Project, policy: str) -> None:
    before = _ended(project, policy)
    project.gatekeeper.go_on(policy, datetime.now(UTC))
    project.handovers.go_on(policy, datetime.now(UTC))
    _tell(project, policy, before)


def _tidy() -> None:
    for project in _projects():
        project.sweeper.go_on(datetime.now(UTC))


def _take(project: Project, policy: str) -> bool:
    before = _ended(project, policy)
    taken = take_step(policy, project.store, learners, _replicas(), project.settings)
    if taken:
        project.sweeper.written()
    # A claim ends steps too: those with nothing to train on, and those that used up their attempts.
    _tell(project, policy, before)
    return taken
