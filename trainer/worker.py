"""The training worker, whatever starts its sweeps: Celery (`trainer.tasks`) or a launched job (`trainer.job`)."""

import logging
import threading
from datetime import UTC, datetime

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
from whetstone.config.settings import Settings, SettingsError
from whetstone.database.engine import connect
from whetstone.registry.remote.object_store import store_of
from whetstone.registry.remote.sources import source_of
from whetstone.vllm.client import Vllm

log = logging.getLogger(__name__)


class Worker:
    """Takes the steps of all projects of these settings. Nothing is opened before the first sweep."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.learners = Learners(settings)
        self._resources: _Resources | None = None
        self.stopped = threading.Event()
        """Once it is set, no further step is taken; the one in progress goes on."""
        self._telling = threading.Lock()
        """Steps of several policies may end at the same time, and not every sink can be written to from two threads."""

    def prepare(self) -> None:
        """Check that everything that steps need is here, and remove what killed steps left.

        Raises:
            SystemExit: something is missing; the message says what.
        """
        settings = self._settings
        try:
            team.require(settings.trainer)
            metric_sinks.require(settings.trainer.sinks)
            store_of(settings.adapters)
        except (PeersMissing, SinkMissing, SettingsError) as error:
            # Celery would log an exception of a signal's receiver and continue.
            raise SystemExit(str(error)) from error
        if not settings.vllm.urls:
            raise SystemExit(
                "vllm.urls names no server: what is trained is loaded on vLLM and probed there. `whetstone up` starts "
                "a worker that knows its servers; for one of your own set WHETSTONE_VLLM__URLS"
            )
        files.sweep(settings.data.resolve() / "adapters")

    def sweep(self) -> bool:
        """Continue candidates that are in tests, remove old adapters, take every step that is due; return whether any
        was taken."""
        try:
            if self._resources is None:
                self._resources = _Resources(self._settings)
            projects = self._resources.projects
            # No two projects have a policy of the same name.
            of = {policy: project for project in projects for policy in project.store.policies()}
            return rounds(
                sorted(of),
                lambda policy: self._go_on(of[policy], policy),
                lambda: _tidy(projects),
                lambda policy: self._take(of[policy], policy),
                self._settings.trainer.policies_at_once,
            )
        except DBAPIError as error:
            # An interrupted step is taken over when its lease ends.
            log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
            return False

    def _go_on(self, project: "_Project", policy: str) -> None:
        before = self._ended(project, policy)
        project.gatekeeper.go_on(policy, datetime.now(UTC))
        project.handovers.go_on(policy, datetime.now(UTC))
        self._tell(project, policy, before)

    def _take(self, project: "_Project", policy: str) -> bool:
        assert self._resources is not None
        if self.stopped.is_set():
            return False
        before = self._ended(project, policy)
        taken = take_step(policy, project.store, self.learners, self._resources.replicas, project.settings)
        if taken:
            project.sweeper.written()
        # A claim ends steps too: those with nothing to train on, and those that used up their attempts.
        self._tell(project, policy, before)
        return taken

    def _ended(self, project: "_Project", policy: str) -> EndedStep | None:
        """Return the last step that is over; not read where no sink needs it."""
        return project.store.ended(policy) if self._settings.trainer.sinks else None

    def _tell(self, project: "_Project", policy: str, before: EndedStep | None) -> None:
        """Report the last ended step to the sinks, if it has ended since `before`."""
        assert self._resources is not None
        ended = self._ended(project, policy)
        if ended is not None and ended != before:
            with self._telling:
                self._resources.sinks.tell(ended)


class _Project:
    """The objects that take the steps of one project."""

    def __init__(self, own: Settings, engine: Engine) -> None:
        self.settings = own
        self.store = Store(engine, own.project, own.home)
        self.gatekeeper = GateController(GateTables(engine, own.project), own)
        self.handovers = HandoverController(HandoverTables(engine, own.project), own)
        # An adapter store is one for all projects.
        manifests = ManifestStore(engine) if own.project == own.home else None
        self.sweeper = Sweeper(RetentionStore(engine, own.project, own.home), own, manifests)


class _Resources:
    """What sweeps use: the database, the servers, the sinks."""

    def __init__(self, settings: Settings) -> None:
        engine = connect(settings.database_url)
        self.projects = [_Project(own, engine) for own in settings.of_projects()]
        # Where all machines see the folder, vLLM checks what it loads by itself.
        source = source_of(settings.data, settings.adapters) if settings.adapters.is_remote else None
        self.replicas = Replicas({url: Vllm(url) for url in settings.vllm.urls}, source)
        self.sinks = metric_sinks.Sinks(settings.trainer.sinks, settings.data.resolve())


def _tidy(projects: "list[_Project]") -> None:
    for project in projects:
        project.sweeper.go_on(datetime.now(UTC))
