"""Run the clients that people use, unchanged but for address, key and model, and say what becomes of their calls.

Installs the packages of each client from the public indexes into an environment of its own (`data/clients`), starts a
proxy with a database of its own before a model server that calls tools by rule, and runs the client's app in an empty
home, on loopback. Exit 0 only if of each client everything holds that its row does not except.
"""

import argparse
import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.clients import bodies, environments
from benchmarks.clients.page import page
from benchmarks.clients.report import Row, row_of
from benchmarks.clients.table import BY_NAME, CLIENTS, Client
from benchmarks.clients.tap import Tap
from benchmarks.fakes.tool_vllm import ToolVllm
from benchmarks.kit.check import verdict
from benchmarks.kit.harness import opened, prepared
from benchmarks.kit.options import parser_of
from benchmarks.kit.process import DRAIN_S, START_S, ready, running_proxy, until
from whetstone.config.settings import load

NAMED_URL = "/r/trajectory/a-name-of-its-own"


async def row_of_run(client: Client, model: ToolVllm, folder: Path, at: str = "", keep: Path | None = None) -> Row:
    """Run a client once. `at`: what its address has after the proxy's; `keep`: a folder for its requests.

    Raises:
        subprocess.CalledProcessError: its packages cannot be installed.
    """
    environment = await asyncio.to_thread(environments.install, client)
    folder.mkdir(parents=True)
    model.begin(client.rules)
    model_server = await model.start()
    # There is no broker: hints are lost, which does not matter here.
    settings = load(environment={}, data=folder, broker="redis://127.0.0.1:1/0", vllm__urls=(model_server,))
    with prepared(settings) as engine, running_proxy(settings, folder / "proxy.log") as (url, _):
        tap = Tap(url)
        async with aiohttp.ClientSession() as session:
            if not await until(lambda: ready(session, url), START_S):
                sys.exit(f"the proxy did not start: {folder / 'proxy.log'}")
            tapped = await tap.start()
            result = await environments.run(client, environment, tapped + at, folder)
            await tap.stop()
            await until(lambda: ready(session, url, unwritten=0), DRAIN_S)
        model.stop()
        (folder / "output.txt").write_text(f"{result.output}\n{result.errors}")
        if keep is not None:
            private = {str(folder): "/home/user", str(environment): "/opt/client", tapped: "http://127.0.0.1:8000"}
            bodies.write(client.name, tap.calls, private, keep)
        return row_of(client, result, tap.calls, model.sampled, engine)


async def rows_of(clients: list[Client], data: Path, keep: Path | None, console: Console) -> list[Row]:
    """Run one client after the other; where it makes several trajectories, once more with a name in the URL."""
    rows = []
    model = ToolVllm((f"{environments.MODEL}@v0",))
    for client in clients:
        console.print(f"[dim]{client.name}[/dim]", highlight=False)
        row = await row_of_run(client, model, data / client.name, keep=keep)
        if row.trajectories > 1:
            named = await row_of_run(client, model, data / f"{client.name}-named", NAMED_URL)
            row = replace(row, named=named.trajectories)
        for fault in row.lacking.values():
            console.print(f"  [dim]{escape(fault)}[/dim]", highlight=False)
        rows.append(row)
    return rows


def table_of(rows: list[Row]) -> Table:
    """Return the rows for the console."""
    table = Table("client", "works", "recorded", "trajectories", "trainable", "decided", "id")
    for row in rows:
        table.add_row(
            row.client.name,
            "no" if "works" in row.lacking else "yes",
            f"{row.recorded}/{row.calls}",
            f"{row.trajectories}" + ("" if row.named is None else f" ({row.named} named)"),
            f"{row.share:.0%}",
            str(row.decided),
            row.answer_id or "–",
        )
    return table


def main() -> int:
    """Run the clients."""
    parser = parser_of(
        __doc__.splitlines()[0],
        {
            "--only": {"nargs": "+", "choices": list(BY_NAME), "metavar": "CLIENT", "help": "only these"},
            "--bodies": {"type": Path, "help": "a folder to write the clients' requests to"},
            "--page": {"type": Path, "help": "write their rows into this page"},
            "--data": {"type": Path, "help": "a new folder to keep databases and logs in"},
            "--install": {"action": "store_true", "help": "install the packages, and run nothing"},
        },
        argparse.ArgumentDefaultsHelpFormatter,
    )
    args = parser.parse_args()
    clients = [client for client in CLIENTS if args.only is None or client.name in args.only]
    with opened("clients", args.data) as (data, console):
        try:
            if args.install:
                for client in clients:
                    environments.install(client)
                return 0
            rows = asyncio.run(rows_of(clients, data, args.bodies, console))
        except subprocess.CalledProcessError as error:
            sys.exit(f"the packages cannot be installed: {error}")
        console.print(table_of(rows))
        if args.page is not None:
            before = args.page.read_text(encoding="utf-8") if args.page.is_file() else ""
            args.page.write_text(page(rows, before), encoding="utf-8")
        return verdict([fault for row in rows for fault in row.faults], console)


if __name__ == "__main__":
    sys.exit(main())
