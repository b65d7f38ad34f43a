"""Format what `whetstone status` knows, for people."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from whetstone.cli.tables.status.problems import LEAST_FREE_BYTES, size
from whetstone.cli.tables.trajectory_tables import ago, pairs_table
from whetstone.doctor.training_store import QUEUE
from whetstone.terminal.listing import Listing

Facts = Mapping[str, Any]


def shown(facts: Facts, now: datetime) -> RenderableType:
    """Return the facts as one screen: what runs, the policies, why nothing trains, the problems."""
    policies = (_policies(facts, now), *_gains(facts))
    return Group(_head(facts), Text(), *policies, Text(), *_training(facts), *_problems(facts))


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
    else:
        table.add_row("proxy", Text(facts["phase"] or "not started by `whetstone up` on this folder", style="dim"))
    for one in facts["replicas"]:
        table.add_row("vLLM", escape(f"{one['url']} {one['state']}" + (f": {one['reason']}" if one["reason"] else "")))
    alive = {one["name"]: one for one in facts["processes"]}
    for name, words in (("judge", "judge"), ("trainer", "trainer")):
        if (one := alive.pop(name, None)) is not None:
            state = f"runs (process {one['pid']})" if one["alive"] else f"dead (process {one['pid']})"
            table.add_row(words, Text(state, style="green" if one["alive"] else "red"))
    if alive:
        parts = (f"{one['name']} {one['pid']}" + ("" if one["alive"] else " dead") for one in alive.values())
        table.add_row("processes", ", ".join(parts))
    if (free := facts["free_bytes"]) is not None:
        table.add_row("disk", Text(f"{size(free)} free", style="red" if free < LEAST_FREE_BYTES else ""))
    if (spent := facts["spending"]) is not None:
        cap = "" if spent["usd_per_day"] is None else f" of ${spent['usd_per_day']:,.2f}"
        costs = f"judges ${spent['judges_usd']:,.2f}, upstreams ${spent['upstreams_usd']:,.2f}"
        style = "red" if spent["is_reached"] else ""
        table.add_row("spent today", Text(f"${spent['usd']:,.2f}{cap} ({costs})", style=style))
    if facts["completeness"] is not None:
        table.add_row("recorded", f"{facts['completeness']:.2%} of the tokens that vLLM sampled")
    return table


def _policies(facts: Facts, now: datetime) -> RenderableType:
    if not facts["policies"]:
        return Text("no policy yet", style="dim")
    names = ("policy", "state", "versions", "last step", "groups")
    table = Table(*map(Column, names), box=None, pad_edge=False, header_style="bold")
    for row in facts["policies"]:
        state = row["state"] if row["upstream"] is None else row["upstream"]
        candidate = "" if row["candidate"] is None else f", v{row['candidate']} candidate"
        counts = ", ".join(f"{row['groups'][name]} {name}" for name in QUEUE if row["groups"][name])
        cells = (row["policy"], state, f"v{row['live_version']} live{candidate}", _step(row, now))
        table.add_row(*map(escape, cells), counts or "none waits")
    return Listing(table, ids=("policy",))


def _step(row: Facts, now: datetime) -> str:
    step = row["last_step"]
    if step is None:
        return "none yet"
    return f"{step['step']} {step['state']} {ago(step['created_at'], now)} ago"


def _gains(facts: Facts) -> Iterator[RenderableType]:
    """Yield a line for each gain that is known: of the live version over version 0, and of the last step."""
    gains = [
        Text(f"{row['policy']} {_gain(gain)}")
        for row in facts["policies"]
        for gain in (row["gain"], row["last_step"] and row["last_step"]["gain"])
        if gain is not None and (gain is row["gain"] or gain != row["gain"])
    ]
    if gains:
        yield from (Text(), *gains)


def _gain(gain: Facts) -> str:
    half = (gain["high"] - gain["low"]) / 2
    difference = f"v{gain['version']} over v{gain['over']}: reward {gain['mean']:+.3f} ± {half:.3f}"
    before, after = gain["rewarded"]
    if gain["pairs"] is not None:
        return f"{difference} on held-out calls, {gain['pairs']} pairs at the same prompts"
    if gain["split"] == "eval":
        return f"{difference} on held-out calls ({before} and {after}, not at the same prompts)"
    if gain["same_prompts"] is False:
        return (
            f"v{gain['version']} over v{gain['over']}: not compared, because their prompts in training differ; "
            "send held-out calls (`X-Split: eval`)"
        )
    return f"{difference} in training"


def _training(facts: Facts) -> Iterator[RenderableType]:
    rows = [row for row in facts["policies"] if row["training"] is not None]
    trains = [row for row in rows if row["training"]["now"]]
    if not rows:
        return
    for row in trains:
        yield Text(f"{row['policy']} trains now: step {row['last_step']['step']}", style="green")
    if len(trains) < len(rows):
        yield Text("Why nothing trains now" if not trains else "Why the others do not train", style="bold")
    for row in rows:
        if not row["training"]["now"]:
            why, uniform = row["training"], row["training"]["uniform"]
            yield Padding(Text(f"{row['policy']}: {why['why_not']}"), (0, 0, 0, 2), expand=False)
            if uniform is None or uniform["remedy"] != why["remedy"]:
                yield Padding(Text(f"→ {why['remedy']}", style="dim"), (0, 0, 0, 4), expand=False)
            if uniform is not None:
                yield Padding(Text(uniform["what"]), (0, 0, 0, 4), expand=False)
                yield Padding(Text(f"→ {uniform['remedy']}", style="dim"), (0, 0, 0, 4), expand=False)
    yield Text()


def _problems(facts: Facts) -> Iterator[RenderableType]:
    if not facts["problems"]:
        yield Text("nothing is wrong", style="green")
    for one in facts["problems"]:
        yield Text.assemble((f"✗ {one['what']}", "red"), f"\n  {one['do']}")
