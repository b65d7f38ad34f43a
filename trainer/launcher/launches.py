"""Run the launcher's command, once at a time, and record each run."""

import logging
import subprocess
from datetime import UTC, datetime, timedelta

from trainer.launcher.store import VAIN, LaunchTable
from whetstone.config.launcher import LAUNCHER_STOPS_S, LauncherSettings

FIRST_PAUSE_S = 30.0
"""After a launch that took no step, the next one waits this long; after each further one twice as long."""
LONGEST_PAUSE_S = 3600.0

log = logging.getLogger(__name__)


class Launches:
    """Starts the command, sees it end, and waits before it starts one that took no step again."""

    def __init__(self, settings: LauncherSettings, table: LaunchTable) -> None:
        self._settings = settings
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._began = datetime.min.replace(tzinfo=UTC)
        self._ended: tuple[datetime, int | None, str | None] | None = None
        """Time, exit code and error of a launch whose end is not recorded yet."""
        self._vain = 0
        """Launches in a row that took no step."""
        self._paused_until: datetime | None = None

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet, as far as `look` has seen."""
        return self._process is not None

    def may_start(self, now: datetime) -> bool:
        """Return whether nothing runs, all ends are recorded, and no pause after a launch in vain is left."""
        is_free = self._process is None and self._ended is None
        return is_free and (self._paused_until is None or now >= self._paused_until)

    def start(self, reason: str, now: datetime) -> None:
        """Start the command, and record why."""
        self._number, self._began = self._table.begin(reason, now), now
        log.info("launch %d begins (%s): %s", self._number, reason, self._settings.command[0])
        try:
            # It stays in this process's session: what kills the launcher's group ends it too.
            self._process = subprocess.Popen(self._settings.command, stdin=subprocess.DEVNULL)
        except OSError as error:
            self._end(now, None, f"the command could not be started: {error}")

    def look(self, now: datetime) -> None:
        """Record the end of the command, if it has ended; end it if it has run for too long."""
        if self._ended is not None:
            self._record()
        if self._process is None:
            return
        code = self._process.poll()
        if code is None:
            if (now - self._began).total_seconds() <= self._settings.longest_s:
                return
            code, error = self._ended_by_us(), f"ended after {self._settings.longest_s:g} s (launcher.longest_s)"
        else:
            error = f"the command ended with {code}; what it printed is in the launcher's log" if code else ""
        self._process = None
        self._end(now, code, error or None)

    def stop(self) -> None:
        """Ask the command to end, wait until it has, and record it. It is killed if it takes too long."""
        if self._process is not None:
            code = self._ended_by_us()
            self._process = None
            self._end(datetime.now(UTC), code, "stopped with the launcher")

    def _ended_by_us(self) -> int:
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(LAUNCHER_STOPS_S / 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _end(self, now: datetime, code: int | None, error: str | None) -> None:
        self._ended = now, code, error
        self._record()

    def _record(self) -> None:
        assert self._ended is not None
        now, code, error = self._ended
        price = self._settings.usd_per_hour
        steps = self._table.end(self._number, now, exit_code=code, error=error, usd_per_hour=price)
        self._ended = None
        if steps:
            self._vain, self._paused_until = 0, None
            log.info("launch %d has ended (steps: %d)%s", self._number, steps, f": {error}" if error else "")
            return
        pause_s = min(FIRST_PAUSE_S * 2**self._vain, LONGEST_PAUSE_S)
        self._vain, self._paused_until = self._vain + 1, now + timedelta(seconds=pause_s)
        log.warning("launch %d: %s; the next one waits for %g s", self._number, error or VAIN, pause_s)
