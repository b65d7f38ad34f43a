"""Count the instructions per request, thread by thread: a figure that other programs on the machine do not change.

The whole proxy runs under valgrind's callgrind, about thirty times slower, with 16 connections. Its periodic work
counts too, so that few requests cost more each than many. Needs Debian's `valgrind`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.bench import start
from benchmarks.bench.load import closed_loop
from benchmarks.bench.sides import Side
from benchmarks.bench.upstream import KINDS
from benchmarks.kit.process import running_broker

CONNECTIONS = 16
WARM_S = 5.0
"""Duration of the warm-up, which is not counted."""
REFRESH_S = 10.0
"""How often the proxy reads changes of others: seldom, as that would count as cost of the requests."""
LEAST = 0.01
"""Threads with a smaller share are left out."""
NAMES = {"01": "event loop", "": "all"}
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


def read(folder: Path) -> dict[str, int]:
    """Read what callgrind wrote there (`callgrind.1-01`: the first dump, thread 1): thread -> its instructions, the
    largest first.
    """
    matches = {path: _TOTALS.search(path.read_text(errors="replace")) for path in folder.glob("callgrind.*")}
    counts = {path.suffix.partition("-")[2]: int(match[1]) for path, match in matches.items() if match}
    return dict(sorted(counts.items(), key=lambda count: count[1], reverse=True))


async def _ask(side: Side, kind: str, seconds: float) -> int:
    """Send requests while counting; return the number of answers."""
    await closed_loop(side.target, kind, CONNECTIONS, WARM_S)
    side.wait_written()
    _control(side, "--instr=on")
    took = await closed_loop(side.target, kind, CONNECTIONS, seconds)
    side.wait_written()
    _control(side, "--instr=off")
    _control(side, "--dump")
    if took.faults or not took.ms:
        raise SystemExit(f"it does not answer as it should: {took.faults[:3]}")
    return len(took.ms)


def _control(side: Side, order: str) -> None:
    subprocess.run(["callgrind_control", order, str(side.pids[0])], check=True, capture_output=True)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS[:3], default="plain")
    parser.add_argument("--form", choices=start.FORMS, default="whetstone", help="of the proxy")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests are sent; some 40 in each")
    parser.add_argument("--out", type=Path, help="an empty folder for callgrind's files, which stay")
    args = parser.parse_args()
    if shutil.which("callgrind_control") is None:
        sys.exit("this needs valgrind: `apt-get install valgrind`")
    console = Console(width=100)
    with tempfile.TemporaryDirectory(prefix="instructions-") as temporary:
        folder = args.out or Path(temporary) / "callgrind"
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"{folder} is not empty")
        under = ["valgrind", "--tool=callgrind", "--separate-threads=yes", "--instr-atstart=no", "--quiet"]
        under += [f"--callgrind-out-file={folder}/callgrind"]
        with (
            running_broker() as broker,
            start.upstream() as direct,
            start.proxy(
                args.form,
                direct.target.url,
                broker,
                Path(temporary) / "proxy",
                [set(os.sched_getaffinity(0))],
                under,
                proxy__refresh_s=REFRESH_S,
            ) as side,
        ):
            console.print("valgrind starts a proxy and asks it: a minute", style="dim")
            requests = uvloop.run(_ask(side, args.kind, args.seconds))
        counted = read(folder)
        table = Table(title=f"{requests} requests ({args.kind}, {CONNECTIONS} connections)")
        table.add_column("thread")
        table.add_column("instructions a request", justify="right")
        whole = sum(counted.values())
        for thread, count in (counted | {"": whole}).items():
            if count >= LEAST * whole:
                table.add_row(NAMES.get(thread, f"thread {thread}"), f"{count / requests:,.0f}")
        console.print(table)
        if args.out:
            console.print(f"look further: callgrind_annotate --inclusive=yes {folder}/callgrind.1-01", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
