"""Show what a start is doing, and for how long: a line with a spinner on a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import itemgetter
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


@contextmanager
def show_progress(
    say: Say,
    console: Console | None,
    what: str,
    done: str,
    latest: Callable[[], str | None] = lambda: None,
    expected_s: float | None = None,
) -> Iterator[Callable[[], None]]:
    """Show `what` until the block ends: on the console if it is a terminal, else by `say`. Then say `done` with the
    seconds that it took.

    Args:
        what: for example "starting vLLM".
        done: for example "vLLM is ready".
        latest: returns the latest phase; called repeatedly.
        expected_s: seconds that it takes by experience; None if that is unknown.

    Yields:
        A function that checks for a new phase; call it meanwhile.
    """
    began_s = time.monotonic()
    about = "" if expected_s is None else f" of about {expected_s:.0f} s"
    begin = what if expected_s is None else f"{what}, about {expected_s:.0f} s, as the last time"
    status = console.status(escape(begin)) if console is not None and console.is_terminal else None
    if status is None:
        say(escape(begin))
    looked_s, printed_s = 0.0, began_s
    last_phase: str | None = None

    def look() -> None:
        nonlocal looked_s, printed_s, last_phase
        now_s = time.monotonic()
        if now_s - looked_s < LOOK_EVERY_S:
            return
        looked_s = now_s
        phase = latest()
        line = escape(f"{what}, {now_s - began_s:.0f} s{about}{f': {phase}' if phase else ''}")
        if status is not None:
            status.update(line)
        elif phase not in (None, last_phase) or now_s - printed_s >= PLAIN_EVERY_S:
            printed_s = now_s
            last_phase = phase
            say(line)

    with status or nullcontext():
        yield look
    say(escape(f"{done} after {time.monotonic() - began_s:.0f} s"))


def vllm_phase(log: Path, begin: int = 0) -> str:
    """Return what vLLM is doing, by the last match of PHASES in its log from byte `begin` on."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return LOADING
    begun = [(match.start(), match.expand(words)) for pattern, words in PHASES for match in re.finditer(pattern, text)]
    return max(begun, default=(0, LOADING), key=itemgetter(0))[1]
