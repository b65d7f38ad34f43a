"""Run the launcher until SIGTERM or SIGINT: `python -m trainer.launcher`, which `whetstone up` starts by itself."""

import logging
import signal
import threading
from datetime import UTC, datetime

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from trainer.gate.controller import GateController
from trainer.gate.handover import HandoverController
from trainer.launcher.due import why_due
from trainer.launcher.launches import Launches
from trainer.launcher.store import LaunchTable
from trainer.store.eligible_groups import policy_names
from trainer.store.gate_tests import GateTables
from trainer.store.handover import HandoverTables
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.observability import log_setup, tracing

log = logging.getLogger("trainer.launcher")


class Launcher:
    """Continues tests, and launches the command while any policy of any project has a step to take."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """Prepare it.

        Raises:
            SettingsError: `launcher.command` is not set.
        """
        if settings.launcher is None:
            raise SettingsError("launcher.command is not set: it starts the machine that takes the steps")
        self._projects = [
            (
                own,
                GateController(GateTables(engine, own.project), own),
                HandoverController(HandoverTables(engine, own.project), own),
            )
            for own in settings.of_projects()
        ]
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.launches = Launches(settings.launcher, LaunchTable(engine, settings.home))

    def sweep(self, now: datetime) -> None:
        """Do once what is due."""
        self.launches.look(now)
        for own, gate, handovers in self._projects:
            with self._reader.connect() as connection:
                policies = policy_names(connection, own.project)
            for policy in policies:
                gate.go_on(policy, now)
                handovers.go_on(policy, now)
        if self.launches.may_start(now) and (reason := self._why_due(now)) is not None:
            self.launches.start(reason, now)

    def _why_due(self, now: datetime) -> str | None:
        with self._reader.connect() as connection:
            for own, _, _ in self._projects:
                for policy in policy_names(connection, own.project):
                    learning = own.parts_learning_of(policy)
                    reason = why_due(connection, own.project, policy, own.trainer, now, learning)
                    if reason is not None:
                        return reason
        return None


def main() -> None:
    """Sweep every `sweep_s` seconds until a signal comes."""
    try:
        settings = load()
        launcher = Launcher(settings, connect(settings.database_url))
    except SettingsError as error:
        raise SystemExit(str(error)) from error
    log_setup.set_up(settings.log)
    tracing.start(settings.log, "trainer")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    log.info("the launcher is ready.")
    while not stopped.is_set():
        try:
            launcher.sweep(datetime.now(UTC))
        except DBAPIError as error:
            log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
        stopped.wait(settings.sweep_s)
    launcher.launches.stop(datetime.now(UTC))


if __name__ == "__main__":
    main()
