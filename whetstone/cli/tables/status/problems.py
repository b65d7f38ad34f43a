"""Say what is wrong with a stack, each with its remedy."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from whetstone.cli.tables.trajectory_tables import ago
from whetstone.config.settings import Settings
from whetstone.doctor.training import PHASES
from whetstone.domain.ids import IMPORTED_LOG

Facts = Mapping[str, Any]
LATE = timedelta(minutes=2)
"""A worker that has not processed something for this long does not work."""
LEAST_COMPLETENESS = 0.99
MOST_JUMP_S = 60.0
"""Largest jump of the clock that is normal: NTP may set it after a start."""
LEAST_FREE_BYTES = 2**30
"""Least free bytes on the data folder's disk. `up` does not start with less than a quarter of this."""


def problems(facts: Facts, settings: Settings, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, each with its remedy."""
    logs = settings.data / "logs"
    # If the settings list servers, as in containers, `up` has started nothing.
    if facts["phase"] is not None:
        yield f"the stack on {settings.data} is {facts['phase']}", PHASES[facts["phase"]]
    elif not facts["running"] and not settings.vllm.urls:
        yield f"no stack runs on {settings.data}", "start it with `whetstone up`, or name its folder with --data"
    for one in facts["processes"]:
        if not one["alive"]:
            yield f"{one['name']} (process {one['pid']}) is dead", f"`up` starts it again; {logs / one['name']}.log"
    yield from _of_proxy(facts, logs)
    yield from _of_storage(facts, settings)
    yield from _of_clock(facts)
    if facts["running"] or settings.vllm.urls:
        for one in facts["replicas"]:
            if one["state"] != "serving":
                why = f": {one['reason']}" if one["reason"] else ""
                yield f"the vLLM at {one['url']} is {one['state']}{why}", f"{logs}/vllm*.log says what it does"
        for what, since in facts["waiting_since"].items():
            if since is not None and now - since > LATE:
                yield (
                    f"{what} wait for the judging worker, {ago(since, now)} by now",
                    f"{logs / 'judge.log'} says what it does; if it runs and is idle, restart the broker: nothing "
                    "depends on what that holds",
                )
    yield from _of_spending(facts)
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
    full = "refuses requests (503)" if settings.proxy.when_full == "refuse" else "answers without recording"
    start = (
        "free disk space if the disk is full, else look at"
        if is_file
        else "start the database, restart it if it hangs, or look at"
    )
    if (proxy := facts["proxy"]) is not None and proxy.get("database") is False:
        since = proxy.get("database_away_since")
        answered = "" if proxy.get("journal_full") else ", and apps are still answered"
        yield (
            f"database away: the proxy cannot write to it{f' since {since}' if since else ''}; "
            f"{proxy.get('unwritten') or 0} records wait in the journal{answered}",
            f"{start} {settings.data / 'logs' / 'proxy.log'}; the proxy then writes the records by itself",
        )
    if not facts["database"]:
        correct = f"free disk space if the disk is full, else check {settings.data / 'whetstone.db'}"
        yield (
            f"the database does not answer: {facts['database_error']}",
            correct if is_file else "start it, restart it if it hangs, or correct `database`",
        )
    if proxy is not None and proxy.get("journal_full"):
        yield (
            f"journal full: it takes no more records, and the proxy {full}",
            f"make room on the disk of {settings.data}, or raise proxy.max_journal_bytes; if the disk returns errors "
            "(dmesg), move the folder to another. The proxy goes on by itself",
        )
    if (free := facts["free_bytes"]) is not None and free < LEAST_FREE_BYTES:
        yield (
            f"few free bytes: {size(free)} are left on the disk of {settings.data}",
            f"delete what is not needed, let the log expire (privacy.keep_days), or move the folder to a larger disk; "
            f"when the disk is full, the proxy {full}",
        )


def _of_clock(facts: Facts) -> Iterator[tuple[str, str]]:
    jump_s = facts["clock_jump_s"]
    if jump_s is not None and abs(jump_s) > MOST_JUMP_S:
        direction = "ahead" if jump_s > 0 else "back"
        yield (
            f"clock jumped: {direction} by {timedelta(seconds=round(abs(jump_s)))} since the proxy started",
            "let NTP set the clock of its machine (`timedatectl`); if it is right now, restart the proxy",
        )


def _of_spending(facts: Facts) -> Iterator[tuple[str, str]]:
    if (spent := facts["spending"]) is not None and spent["is_reached"]:
        yield (
            f"spending cap reached: ${spent['usd']:,.2f} of ${spent['usd_per_day']:,.2f} are spent on {spent['day']}; "
            "judging waits, and upstreams that cost money answer 429",
            "wait until midnight UTC, or raise spending.usd_per_day and start the stack again",
        )


def _of_completeness(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield nothing while records wait to be written: their tokens are recorded, but not counted yet."""
    share, proxy = facts["completeness"], facts["proxy"] or {}
    is_waiting = facts["unwritten"] or proxy.get("unwritten") or proxy.get("database") is False
    if share is not None and share < LEAST_COMPLETENESS and not is_waiting:
        yield (
            f"{1 - share:.1%} of the tokens that vLLM sampled are not recorded",
            'send no call to vLLM past the proxy (a judge with `model = "base"` does). Answers on their way are not '
            "counted yet, nor what was sampled for clients that went away before the end",
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


def size(free_bytes: float) -> str:
    """Format a number of bytes, in GiB or MiB."""
    return f"{free_bytes / 2**30:,.1f} GiB" if free_bytes >= LEAST_FREE_BYTES else f"{free_bytes / 2**20:,.0f} MiB"
