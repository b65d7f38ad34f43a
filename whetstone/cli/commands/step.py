"""`whetstone step`: request a step from the running proxy, and watch it until it is over."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone.config.settings import Settings
from whetstone.registry.projects import Store
from whetstone.stack import admin_client
from whetstone.stack.admin_client import RefusedByProxy
from whetstone.terminal.fitting import Fitting

LOOK_EVERY_S = 0.2
UNSEEN_S = 30
"""After this many seconds, report that no worker has the step: the training worker is busy with another policy, or
dead."""
IN_TESTS = "waits for the tests of its candidate (SELECT * FROM admin_versions; Ctrl-C leaves it to them)"
FIGURES = (
    "groups", "trajectories", "completions", "rows", "sampled_tokens", "reward_mean", "reward_spread", "loss", "kl",
    "entropy", "mismatch_k3", "grad_norm", "tokens_per_s", "seconds",
)  # fmt: skip
"""Columns of a step that are shown if they are not NULL."""


class _StepResponse(msgspec.Struct):
    """The fields of the proxy's answer that are used here."""

    policy: str
    asked_at: datetime


def ask(data: Path, policy: str, body: dict[str, Any]) -> datetime:
    """Request a step from the proxy of the stack on `data`. Return the time of the request, which identifies it.

    Raises:
        StackNotRunning, ProxyUnreachable: no stack runs there, or its proxy cannot be called.
        RefusedByProxy: the proxy refuses, or it is unknown whether it received the request.
    """
    path = f"/admin/policies/{quote(policy, safe='')}/step"
    answer = admin_client.ask(data, path, body, look='`whetstone sql "SELECT * FROM admin_steps"`')
    return msgspec.json.decode(answer, type=_StepResponse).asked_at


def watch(settings: Settings, store: Store, policy: str, requested_at: datetime, console: Console) -> dict[str, Any]:
    """Show the progress of the step until it has ended; return its row.

    Raises:
        RefusedByProxy: the stack was stopped meanwhile.
    """
    began = time.monotonic()
    with console.status("requested; waiting for the training worker") as status:
        while True:
            step = store.step_requested_at(settings.project, policy, requested_at)
            waited_s = time.monotonic() - began
            if step is not None:
                if step["ended_at"] is not None:
                    return step
                is_in = IN_TESTS if step["state"] == "waiting_gate" else f"is {step['state']}"
                status.update(f"step {step['number']} of {escape(policy)} {is_in}, {waited_s:.0f} s")
            elif waited_s > UNSEEN_S:
                log = settings.data / "logs" / "trainer.log"
                status.update(f"no worker has taken it for {waited_s:.0f} s; {escape(str(log))} says what it does")
            if not (settings.data / "up.json").exists():
                raise RefusedByProxy("the stack was stopped; the step goes on when it is started again")
            time.sleep(LOOK_EVERY_S)


def shown(step: dict[str, Any]) -> RenderableType:
    """Return a table of the step's figures."""
    table = Table(show_header=False, title=f"step {step['number']} of {escape(step['policy'])}", title_justify="left")
    table.add_row("kind", step["kind"])
    table.add_row("from", f"version {step['version_in']}")
    if step["version_out"] is not None:
        table.add_row("made", f"version {step['version_out']}, {step['state']}")
    for name in FIGURES:
        if (value := step[name]) is not None:
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return Fitting(table)
