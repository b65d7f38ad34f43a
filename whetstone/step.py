"""`whetstone step`: a step asked of the proxy that runs, watched until it is over. Takes no step itself."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from whetstone import admin
from whetstone.admin import NotDone
from whetstone.fitting import Fitting
from whetstone.settings import Settings
from whetstone.store import Store

LOOK_EVERY_S = 0.2
UNSEEN_S = 30
"""Nobody has taken the step after so long: the training worker is busy with another policy, or dead."""
IN_TESTS = "waits for the tests of its candidate (SELECT * FROM admin_versions; Ctrl-C leaves it to them)"
FIGURES = (
    "groups", "trajectories", "completions", "rows", "sampled_tokens", "reward_mean", "reward_spread", "loss", "kl",
    "entropy", "mismatch_k3", "grad_norm", "tokens_per_s", "seconds",
)  # fmt: skip
"""Columns of a step that are shown, where they are not NULL."""


class _Asked(msgspec.Struct):
    """What the proxy answers, as far as it goes here."""

    policy: str
    asked_at: datetime


def ask(data: Path, policy: str, body: dict[str, Any]) -> datetime:
    """Ask the proxy of the stack on `data` for a step; when it was asked for, which names it from then on.

    Raises:
        NoStack, NotAsked: none runs there, or its proxy cannot be asked.
        NotDone: the proxy refuses it, or nobody knows whether it was asked.
    """
    path = f"/admin/policies/{quote(policy, safe='')}/step"
    answer = admin.ask(data, path, body, look='`whetstone sql "SELECT * FROM admin_steps"`')
    return msgspec.json.decode(answer, type=_Asked).asked_at


def watch(settings: Settings, store: Store, policy: str, asked_at: datetime, console: Console) -> dict[str, Any]:
    """Show how the step goes on until it has ended; its row.

    Raises:
        NotDone: the stack was stopped meanwhile.
    """
    began = time.monotonic()
    with console.status("asked for; waits for the training worker") as status:
        while True:
            step = store.step_asked_at(settings.project, policy, asked_at)
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
                raise NotDone("the stack was stopped; the step goes on when it is started again")
            time.sleep(LOOK_EVERY_S)


def shown(step: dict[str, Any]) -> RenderableType:
    """The step's figures."""
    table = Table(show_header=False, title=f"step {step['number']} of {escape(step['policy'])}", title_justify="left")
    table.add_row("kind", step["kind"])
    table.add_row("from", f"version {step['version_in']}")
    if step["version_out"] is not None:
        table.add_row("made", f"version {step['version_out']}, {step['state']}")
    for name in FIGURES:
        if (value := step[name]) is not None:
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return Fitting(table)
