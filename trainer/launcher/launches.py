"""Run the launcher's command, once at a time, and record each run."""

import logging
import subprocess
from datetime import datetime, timedelta

from trainer.launcher.store import LaunchTable
from whetstone.config.launcher import LauncherSettings

FIRST_PAUSE_S = 30.0
"""After a launch that took no step, the next one waits this long; after each further one twice as long."""
LONGEST_PAUSE_S = 600.0

log = logging.getLogger(__name__)


class Launches:
    """Starts the command, sees it end, and waits before it starts one that failed again."""

    def __init__(self, settings: LauncherSettings, table: LaunchTable) -> None:
        self._settings = settings
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._vain = 0
        """Launches in a row that took no step."""
        self._paused_until: datetime | None = None

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet, as far as `look` has seen."""
        return self._process is not None

    def may_start(self, now: datetime) -> bool:
        """Return whether nothing runs, and no pause after a failure is left."""
        return self._process is None and (self._paused_until is None or now >= self._paused_until)

    def start(self, reason: str, now: datetime) -> None:
        """Start the command, and record why."""
        self._number = self._table.begin(reason, now)
        log.info("launch %d begins (%s): %s", self._number, reason, self._settings.command[0])
        try:
            # It stays in this process's session: what stops the launcher for good stops it too.
            self._process = subprocess.Popen(self._settings.command, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._end(now, None, f"the command could not be started: {error}")

    def look(self, now: datetime) -> None:
        """Record the end of the command, if it has ended."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._process = None
        failed = f"the command ended with {code}; what it printed is in the launcher's log"
        self._end(now, code, failed if code else None)

    def stop(self, now: datetime) -> None:
        """Ask the command to end, and wait until it has."""
        if self._process is None:
            return
        self._process.terminate()
        code = self._process.wait()
        self._process = None
        self._end(now, code, "stopped with the launcher")

    def _end(self, now: datetime, code: int | None, error: str | None) -> None:
        price = self._settings.usd_per_hour
        steps = self._table.end(self._number, now, exit_code=code, error=error, usd_per_hour=price)
        if error is None and not steps:
            error = "no step ended while the command ran"
        if error is None:
            self._vain, self._paused_until = 0, None
            log.info("launch %d has ended; steps meanwhile: %d", self._number, steps)
            return
        pause_s = min(FIRST_PAUSE_S * 2**self._vain, LONGEST_PAUSE_S)
        self._vain, self._paused_until = self._vain + 1, now + timedelta(seconds=pause_s)
        log.warning("launch %d: %s; the next one begins in %g s at the earliest", self._number, error, pause_s)
