"""`whetstone step`: a step asked of the proxy that runs, watched until it is over. Takes no step itself."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whetstone.settings import Settings
from whetstone.store import Store

LOOK_EVERY_S = 0.2
UNSEEN_S = 30
"""Nobody has taken the step after so long: the training worker is busy with another policy, or dead."""
FIGURES = (
    "groups", "trajectories", "completions", "rows", "sampled_tokens", "reward_mean", "reward_spread", "loss", "kl",
    "entropy", "mismatch_k3", "grad_norm", "tokens_per_s", "seconds",
)  # fmt: skip
"""Columns of a step that are shown, where they are not NULL."""


class NoStack(Exception):
    """No stack runs that could be asked; the message says where it was looked for, and what to do."""


class StepNotTaken(Exception):
    """The proxy refuses the step, or the stack was stopped before its end; the message says why."""


class _Asked(msgspec.Struct):
    """What the proxy answers, as far as it goes here."""

    policy: str
    asked_at: datetime


class _Refused(msgspec.Struct):
    class Error(msgspec.Struct):
        message: str

    error: Error


class _Running(msgspec.Struct):
    proxy: str


def ask(data: Path, policy: str, body: dict[str, Any]) -> datetime:
    """Ask the proxy of the stack on `data` for a step; when it was asked for, which names it from then on.

    Raises:
        NoStack: none runs there.
        StepNotTaken: the proxy refuses it.
    """
    url = _proxy(data)
    path = f"/admin/policies/{quote(policy, safe='')}/step"
    try:
        answer = httpx.post(url + path, json=body, timeout=60, trust_env=False)
    except httpx.ReadTimeout as error:
        raise StepNotTaken(
            f"the proxy at {url} has not answered for a minute; whether it took the step: SELECT * FROM admin_steps"
        ) from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise NoStack(f"no proxy answers at {url}: start the stack again with `whetstone up` ({error})") from error
    if answer.status_code == 202:
        return msgspec.json.decode(answer.content, type=_Asked).asked_at
    try:
        why = msgspec.json.decode(answer.content, type=_Refused).error.message
    except msgspec.DecodeError:
        why = f"what answers at {url} is no proxy of ours (status {answer.status_code})"
    raise StepNotTaken(why)


def watch(settings: Settings, store: Store, policy: str, asked_at: datetime, console: Console) -> dict[str, Any]:
    """Show how the step goes on until it has ended; its row.

    Raises:
        StepNotTaken: the stack was stopped meanwhile.
    """
    began = time.monotonic()
    with console.status("asked for; waits for the training worker") as status:
        while True:
            step = store.step_asked_at(settings.project, policy, asked_at)
            waited_s = time.monotonic() - began
            if step is not None:
                if step["ended_at"] is not None:
                    return step
                status.update(f"step {step['number']} of {escape(policy)} is {step['state']}, {waited_s:.0f} s")
            elif waited_s > UNSEEN_S:
                log = settings.data / "logs" / "trainer.log"
                status.update(f"no worker has taken it for {waited_s:.0f} s; {escape(str(log))} says what it does")
            if not (settings.data / "up.json").exists():
                raise StepNotTaken("the stack was stopped; the step goes on when it is started again")
            time.sleep(LOOK_EVERY_S)


def shown(step: dict[str, Any]) -> Table:
    """The step's figures."""
    table = Table(show_header=False, title=f"step {step['number']} of {escape(step['policy'])}", title_justify="left")
    table.add_row("kind", step["kind"])
    table.add_row("from", f"version {step['version_in']}")
    if step["version_out"] is not None:
        table.add_row("made", f"version {step['version_out']}, {step['state']}")
    for name in FIGURES:
        if (value := step[name]) is not None:
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def _proxy(data: Path) -> str:
    path = data / "up.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Running).proxy
    except FileNotFoundError:
        raise NoStack(
            f"no stack runs on {data}: start it with `whetstone up`, or name its folder with --data"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise NoStack(f"{path} cannot be read ({error}); stop the stack and start it again") from error
