"""Run the launcher until SIGTERM or SIGINT: `python -m trainer.launcher`, which `whetstone up` starts by itself."""

import logging
import threading
from datetime import UTC, datetime
from functools import partial

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from trainer.gate.controller import GateController
from trainer.gate.handover import HandoverController
from trainer.launcher.launches import Launches
from trainer.launcher.store import LaunchTable
from trainer.step.schedule import guarded
from trainer.store.gate_tests import GateTables
from trainer.store.handover import HandoverTables
from trainer.store.unit_of_work import Store
from whetstone.config.settings import Settings, SettingsError, load
from whetstone.database.engine import connect
from whetstone.observability import log_setup, tracing
from whetstone.stack.supervisor import stop_at_signals

log = logging.getLogger("trainer.launcher")


class Launcher:
    """Continues tests, and launches the command while any policy of any project has a step to take."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """Prepare it.

        Raises:
            SettingsError: `launcher.command` is not set.
        """
        if not settings.launcher.command:
            raise SettingsError("launcher.command is not set: it starts the machine that takes the steps")
        self._projects = [_Project(own, engine) for own in settings.of_projects()]
        self.launches = Launches(settings.launcher, LaunchTable(engine, settings.home))

    def sweep(self, now: datetime) -> None:
        """Do once what is due.

        Raises:
            sqlalchemy.exc.DBAPIError: the database is unreachable.
        """
        self.launches.look(now)
        for project in self._projects:
            for policy in sorted(project.store.policies()):
                guarded(policy, partial(project.gate.go_on, now=now))
                guarded(policy, partial(project.handovers.go_on, now=now))
                if self.launches.running:
                    continue  # its job claims, and discards groups
                # Also while the next launch waits: no job discards groups then.
                reason = guarded(policy, project.why_due)
                if reason is not None and self.launches.may_start(now):
                    self.launches.start(reason, now)


class _Project:
    """The objects of one project."""

    def __init__(self, own: Settings, engine: Engine) -> None:
        self._settings = own
        self.store = Store(engine, own.project, own.home)
        self.gate = GateController(GateTables(engine, own.project), own)
        self.handovers = HandoverController(HandoverTables(engine, own.project), own)

    def why_due(self, policy: str) -> str | None:
        """Return which step the policy has to take; None without one."""
        return self.store.why_due(policy, self._settings.trainer, self._settings.parts_learning_of(policy))


def main() -> None:
    """Sweep every `sweep_s` seconds until a signal comes; a second signal ends the process at once."""
    try:
        settings = load()
        launcher = Launcher(settings, connect(settings.database_url))
    except SettingsError as error:
        raise SystemExit(str(error)) from error
    log_setup.set_up(settings.log)
    tracing.start(settings.log, "trainer")
    stopped = threading.Event()
    stop_at_signals(stopped)
    # At every level of the log: `up` waits for this line.
    logging.getLogger("trainer.launcher.ready").info("the launcher is ready.")
    while not stopped.is_set():
        try:
            launcher.sweep(datetime.now(UTC))
        except DBAPIError as error:
            log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
        except Exception:  # any error: the command runs on, and is looked after at the next sweep
            log.exception("this sweep failed, the next one tries again")
        stopped.wait(settings.sweep_s)
    launcher.launches.stop()


if __name__ == "__main__":
    main()
