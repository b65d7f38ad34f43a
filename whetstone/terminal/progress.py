"""Show what a start is doing, and for how long: a line with a spinner on a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape

LOOK_EVERY_S = 0.5
PLAIN_EVERY_S = 15.0
"""Without a terminal, a line is printed at each new phase, and after this many seconds without a line."""
TAIL_BYTES = 64 * 2**10
"""How much of vLLM's log, from its end, is searched for the latest phase."""
LOADING = "loading vLLM's programs"
"""Phase before the log has any line: vLLM imports PyTorch."""
PHASES = (
    (r"Initializing a V1 LLM engine", "starting the engine"),
    (r"Starting to load model", "loading the model"),
    (r"Downloading |Fetching \d+ files", "downloading the model"),
    (r"Loading [a-z]+ checkpoint shards: +(\d+)% Completed", r"loading the weights, \1 %"),
    (r"Loading weights took", "the weights are loaded"),
    (r"KV cache size", "warming up"),
    (r"Compiling a graph|Dynamo bytecode transform", "compiling the model"),
    (r"Capturing CUDA graph", "capturing CUDA graphs"),
    (r"init engine .*took", "opening the server"),
    (r"Application startup complete", "loading the adapters"),
)
"""Patterns of lines in vLLM's log (0.32), and the phase that begins with each."""
Say = Callable[[str], None]


class Progress:
    """Reports what is being done, by `say` and, if it is a terminal, on the console."""

    def __init__(self, say: Say, console: Console | None = None) -> None:
        self.say = say
        self._console = console if console is not None and console.is_terminal else None

    @contextmanager
    def doing(
        self, what: str, done: str, latest: Callable[[], str | None] = lambda: None
    ) -> Iterator[Callable[[], None]]:
        """Show `what` until the block ends, then report `done` with the seconds that it took.

        Args:
            what: for example "starting vLLM".
            done: for example "vLLM is ready".
            latest: returns the latest phase; called repeatedly.

        Yields:
            A function that checks for a new phase; call it meanwhile.
        """
        began_s = time.monotonic()
        shown = _PhaseLine(self.say, what, began_s)
        if self._console is None:
            self.say(escape(what))
            yield _seldom(lambda: shown.plainly(latest()))
        else:
            with self._console.status(escape(what)) as status:
                yield _seldom(lambda: status.update(shown.line(latest())))
        self.say(escape(f"{done} after {time.monotonic() - began_s:.0f} s"))


class _PhaseLine:
    def __init__(self, say: Say, what: str, began_s: float) -> None:
        self._say, self._what, self._began_s = say, what, began_s
        self._last: str | None = None
        self._printed_s = began_s

    def line(self, phase: str | None) -> str:
        return escape(f"{self._what}, {self._seconds()} s{f': {phase}' if phase else ''}")

    def plainly(self, phase: str | None) -> None:
        now_s = time.monotonic()
        if (phase is not None and phase != self._last) or now_s - self._printed_s >= PLAIN_EVERY_S:
            self._last, self._printed_s = phase, now_s
            self._say(self.line(phase))

    def _seconds(self) -> int:
        return round(time.monotonic() - self._began_s)


def _seldom(look: Callable[[], None]) -> Callable[[], None]:
    last_s = 0.0

    def sometimes() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LOOK_EVERY_S:
            last_s = time.monotonic()
            look()

    return sometimes


def vllm_phase(log: Path, begin: int = 0) -> str:
    """Return what vLLM is doing, by the last match of PHASES in its log from byte `begin` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return LOADING
    last, phase = -1, LOADING
    for pattern, words in PHASES:
        for match in re.finditer(pattern, text):
            if match.start() > last:
                last, phase = match.start(), match.expand(words)
    return phase
