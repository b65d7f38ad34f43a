"""`whetstone status`: show what runs, its state, and problems with their remedies."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from sqlalchemy.exc import SQLAlchemyError

from whetstone.cli.options import ConfigOption, DataOption, JsonObjectOption, database_of, running_settings, show
from whetstone.cli.tables import status_store
from whetstone.cli.tables.trajectory_tables import ago, number, pairs_table
from whetstone.config.settings import Settings
from whetstone.database.engine import snapshot
from whetstone.domain.ids import IMPORTED_LOG
from whetstone.stack.admin_client import addresses, key
from whetstone.terminal.fitting import Fitting

TIMEOUT_S = 5.0
LATE = timedelta(minutes=2)
"""A worker that has not processed something for this long does not work."""
LEAST_COMPLETENESS = 0.99
LEAST_FREE_BYTES = 2**30
"""Least free bytes on the data folder's disk. `up` does not start with less than a quarter of this."""
FIGURES = {
    b"whetstone_capture_completeness": "completeness",
    b"whetstone_data_free_bytes": "free_bytes",
    b"whetstone_unwritten_calls": "unwritten",
}
"""Metrics of the proxy that are read, and their names among the facts."""
Facts = dict[str, Any]


def status(as_json: JsonObjectOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the state of the stack: processes, proxy, vLLM servers, journal, policies, groups, and any problems.

    Exit code 0 if there is no problem, 1 if there is one, 2 if there is nothing to look at.

    Example:

        whetstone status --json | jq '.problems'
    """
    settings = running_settings(data, config)
    database_of(settings)
    now = datetime.now(UTC)
    facts = examine(settings, now)
    show(facts, lambda: shown(facts, now), as_json=as_json)
    raise typer.Exit(1 if facts["problems"] else 0)


def examine(settings: Settings, now: datetime) -> Facts:
    """Return all facts, with `problems`: what is wrong and what to do about it."""
    up = addresses(settings.data)
    facts: Facts = {
        "data": str(settings.data),
        "running": up is not None,
        "proxy": None,
        "processes": [],
        "replicas": [],
        "policies": [],
        "waiting_since": {},
        "database": True,
        **(dict.fromkeys(FIGURES.values()) | {"free_bytes": _free_bytes(settings.data)}),
    }
    if up is not None:
        processes = [{"name": name, "pid": pid, "alive": _alive(pid)} for name, pid in up.pids.items()]
        facts |= {"processes": processes, "proxy": _proxy(up.proxy)} | _figures(up.proxy)
    try:
        with snapshot(settings.database_url) as connection:
            for own in settings.of_projects():
                facts["policies"] += status_store.policies(connection, own.project)
            facts["replicas"] = status_store.replicas(connection, settings.home)
            facts["waiting_since"] = status_store.waiting_since(connection)
    except SQLAlchemyError as error:
        facts |= {"database": False, "database_error": str(getattr(error, "orig", None) or error).strip()}
    facts["problems"] = [{"what": what, "do": do} for what, do in _problems(facts, settings, now)]
    return facts


def shown(facts: Facts, now: datetime) -> RenderableType:
    """Format the facts for people."""
    names = ("policy", "state", "live", "in test", "last step", "groups open/closed/scored/claimed")
    columns = (Column(name, overflow="fold") for name in names)
    policies = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in facts["policies"]:
        step, queue = row["last_step"], row["groups"]
        last = "none yet" if step is None else f"{step['step']} {step['state']}, {ago(step['created_at'], now)} ago"
        if step is not None and step["reward_mean"] is not None:
            last += f", reward {number(step['reward_mean'])}"
        state = row["state"] if row["upstream"] is None else row["upstream"]
        tested = "" if row["candidate"] is None else f"v{row['candidate']}"
        counts = "/".join(str(queue[name]) for name in status_store.QUEUE)
        policies.add_row(escape(row["policy"]), escape(state), f"v{row['live_version']}", tested, last, counts)
    listed = Fitting(policies) if facts["policies"] else Text("no policy yet", style="dim")
    problems = [Text.assemble((f"✗ {one['what']}", "red"), f"\n  {one['do']}") for one in facts["problems"]]
    return Group(_head(facts), Text(), listed, Text(), *(problems or [Text("nothing is wrong", style="green")]))


def _head(facts: Facts) -> RenderableType:
    table = pairs_table()
    table.add_row("data", escape(facts["data"]))
    if (proxy := facts["proxy"]) is not None:
        ready = "ready" if proxy["ready"] else "not ready" if proxy["answers"] else "does not answer"
        away = proxy.get("database") is False
        style = "green" if proxy["ready"] and not away else "red"
        table.add_row("proxy", Text(f"{proxy['url']} {ready}{', database away' if away else ''}", style=style))
        if (unwritten := proxy.get("unwritten")) is not None:
            table.add_row("journal", f"{unwritten} records not in the database yet, {proxy['journal_bytes']:,} bytes")
        if failing := proxy.get("failing"):
            table.add_row("failing", Text(", ".join(failing), style="red"))
    for one in facts["replicas"]:
        table.add_row("vLLM", escape(f"{one['url']} {one['state']}" + (f": {one['reason']}" if one["reason"] else "")))
    if facts["processes"]:
        names = (f"{one['name']} {one['pid']}" + ("" if one["alive"] else " dead") for one in facts["processes"])
        table.add_row("processes", ", ".join(names))
    if (free := facts["free_bytes"]) is not None:
        table.add_row("disk", Text(f"{_size(free)} free", style="red" if free < LEAST_FREE_BYTES else ""))
    if facts["completeness"] is not None:
        table.add_row("recorded", f"{facts['completeness']:.2%} of the tokens that vLLM sampled")
    return table


def _problems(facts: Facts, settings: Settings, now: datetime) -> Iterator[tuple[str, str]]:
    logs = settings.data / "logs"
    # If the settings list servers, as in containers, `up` has started nothing.
    if not facts["running"] and not settings.vllm.urls:
        yield f"no stack runs on {settings.data}", "start it with `whetstone up`, or name its folder with --data"
    for one in facts["processes"]:
        if not one["alive"]:
            yield f"{one['name']} (process {one['pid']}) is dead", f"`up` starts it again; {logs / one['name']}.log"
    yield from _of_proxy(facts, logs)
    yield from _of_storage(facts, settings)
    if facts["running"] or settings.vllm.urls:
        for one in facts["replicas"]:
            if one["state"] != "serving":
                why = f": {one['reason']}" if one["reason"] else ""
                yield f"the vLLM at {one['url']} is {one['state']}{why}", f"{logs}/vllm*.log says what it does"
        for what, since in facts["waiting_since"].items():
            if since is not None and now - since > LATE:
                yield f"{what} wait for the judging worker, {ago(since, now)} by now", f"{logs / 'judge.log'}"
    yield from _of_completeness(facts)
    yield from _of_policies(facts["policies"])


def _of_proxy(facts: Facts, logs: Path) -> Iterator[tuple[str, str]]:
    proxy = facts["proxy"]
    if proxy is None:
        return
    if not proxy["answers"]:
        yield f"the proxy does not answer at {proxy['url']}", f"{logs / 'proxy.log'} says what it does"
    elif proxy.get("writer") is False:
        yield (
            "the proxy is not ready: the thread that writes to the database has ended",
            f"`up` starts the proxy again, which writes what the journal has; {logs / 'proxy.log'} says why",
        )
    elif not proxy["ready"]:
        yield "the proxy is not ready: no vLLM has the live versions", f"wait, or look at {logs}/vllm*.log"
    for name, error in (proxy.get("failing") or {}).items():
        yield f"the proxy's task {name!r} fails: {error}", f"{logs / 'proxy.log'} has more"
    if proxy.get("dropped"):
        yield (
            f"{proxy['dropped']} calls were answered and not recorded",
            "free some disk space, or raise proxy.max_journal_bytes",
        )


def _of_storage(facts: Facts, settings: Settings) -> Iterator[tuple[str, str]]:
    is_file = settings.database_url.startswith("sqlite")
    start = "free disk space if the disk is full, else look at" if is_file else "start the database, or look at"
    if (proxy := facts["proxy"]) is not None and proxy.get("database") is False:
        since = proxy.get("database_away_since")
        yield (
            f"database away: the proxy cannot write to it{f' since {since}' if since else ''}; "
            f"{proxy.get('unwritten') or 0} records wait in the journal, and apps are still answered",
            f"{start} {settings.data / 'logs' / 'proxy.log'}; the proxy then writes the records by itself",
        )
    if not facts["database"]:
        correct = f"free disk space if the disk is full, else check {settings.data / 'whetstone.db'}"
        yield (
            f"the database does not answer: {facts['database_error']}",
            correct if is_file else "start it, or correct `database`",
        )
    if (free := facts["free_bytes"]) is not None and free < LEAST_FREE_BYTES:
        full = "refuses requests" if settings.proxy.when_full == "refuse" else "answers without recording"
        yield (
            f"few free bytes: {_size(free)} are left on the disk of {settings.data}",
            f"delete what is not needed, let the log expire (privacy.keep_days), or move the folder to a larger disk; "
            f"when the disk is full, the proxy {full}",
        )


def _of_completeness(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield nothing while records wait to be written: their tokens are recorded, but not counted yet."""
    share, proxy = facts["completeness"], facts["proxy"] or {}
    is_waiting = facts["unwritten"] or proxy.get("unwritten") or proxy.get("database") is False
    if share is not None and share < LEAST_COMPLETENESS and not is_waiting:
        yield (
            f"{1 - share:.1%} of the tokens that vLLM sampled are not recorded",
            'send no call to vLLM past the proxy (a judge with `model = "base"` does); answers on their way are not '
            "counted yet",
        )


def _of_policies(policies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in policies:
        name, step = row["policy"], row["last_step"]
        if row["upstream"] == IMPORTED_LOG:
            continue
        if row["state"] != "training" and row["groups"]["scored"]:
            what = f"{name} is {row['state']} while {row['groups']['scored']} scored groups wait"
            yield what, f"`whetstone policies train on {name}`"
        if step is not None and step["state"] in ("failed", "rejected"):
            why = f": {step['error']}" if step["error"] else ""
            yield f"step {step['step']} of {name} was {step['state']}{why}", f"`whetstone versions {name}` has more"


def _alive(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's, whose /proc is hidden
    return True


def _proxy(url: str) -> Facts:
    """Return the fields of /readyz; an admin's key gets more of them."""
    facts: Facts = {"url": url, "answers": False, "ready": False}
    try:
        answer = httpx.get(f"{url}/readyz", headers=key(), timeout=TIMEOUT_S, trust_env=False)
        fields = msgspec.json.decode(answer.content, type=dict[str, Any])
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError):
        return facts
    fields.pop("status", None)
    return facts | {"answers": True, "ready": answer.status_code == 200} | fields


def _figures(url: str) -> Facts:
    """Return the metrics of FIGURES that the proxy shows."""
    try:
        answer = httpx.get(f"{url}/metrics", headers=key(), timeout=TIMEOUT_S, trust_env=False)
        lines = [line.split() for line in answer.content.splitlines() if not line.startswith(b"#")]
        return {FIGURES[line[0]]: float(line[1]) for line in lines if len(line) > 1 and line[0] in FIGURES}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return {}


def _free_bytes(data: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(data).free
    return None


def _size(free_bytes: float) -> str:
    return f"{free_bytes / 2**30:,.1f} GiB" if free_bytes >= LEAST_FREE_BYTES else f"{free_bytes / 2**20:,.0f} MiB"
