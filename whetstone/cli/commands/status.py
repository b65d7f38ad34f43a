"""`whetstone status`: show what runs, why nothing trains now, and problems with their remedies."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import typer
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from whetstone.cli.options import ConfigOption, DataOption, JsonObjectOption, database_of, running_settings, show
from whetstone.cli.tables.status import probes, store
from whetstone.cli.tables.status.problems import problems
from whetstone.cli.tables.status.view import shown
from whetstone.config.settings import Settings
from whetstone.database.engine import snapshot
from whetstone.doctor import training, training_store
from whetstone.registry import reward_store
from whetstone.registry.spending import Spending, read_spending
from whetstone.stack import data_lock
from whetstone.stack.admin_client import addresses

Facts = dict[str, Any]


def status(as_json: JsonObjectOption = False, data: DataOption = None, config: ConfigOption = None) -> None:
    """Show the stack at a glance: what runs, each policy's versions and last step, why nothing trains now, problems.

    Why nothing trains comes from counts of calls, rewards and groups; `whetstone step --dry-run` shows a step's own
    choice. A gain is a difference of mean rewards with its 95 % interval, from 30 rewards of either version on: of
    held-out calls (`X-Split: eval`) if there are enough, paired by prompt where prompts repeat; else in training.

    Exit code 0 if there is no problem, 1 if there is one, 2 if there is nothing to look at.

    Examples:

        whetstone status
        whetstone status --json | jq '.policies[].training'
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
        "phase": None if up is not None else data_lock.phase(settings.data),
        "proxy": None,
        "processes": [],
        "replicas": [],
        "policies": [],
        "waiting_since": {},
        "database": True,
        "spending": None,
        **(dict.fromkeys(probes.FIGURES.values()) | {"free_bytes": probes.free_bytes(settings.data)}),
    }
    if up is not None:
        processes = [{"name": name, "pid": pid, "alive": probes.is_alive(pid)} for name, pid in up.pids.items()]
        facts |= {"processes": processes, "proxy": probes.proxy(up.proxy)} | probes.figures(up.proxy)
    try:
        with snapshot(settings.database_url) as connection:
            launch = training_store.last_launch(connection, settings.home) if settings.launcher.command else None
            for own in settings.of_projects():
                rows = training_store.policies(connection, own.project, now - timedelta(days=training.DAYS))
                stack = replace(_stack(facts, own), launch=launch)
                facts["policies"] += [row | _training(connection, row, stack, own, now) for row in rows]
            facts["replicas"] = store.replicas(connection, settings.home)
            if not facts["running"] and not settings.vllm.urls:
                # The table has what the last proxy saw; `up` stops its servers with it.
                state = facts["phase"] or "stopped"
                facts["replicas"] = [one | {"state": state, "reason": None} for one in facts["replicas"]]
            facts["waiting_since"] = store.waiting_since(connection)
            facts["spending"] = _spending(read_spending(connection, settings, now), settings)
    except SQLAlchemyError as error:
        facts |= {"database": False, "database_error": str(getattr(error, "orig", None) or error).strip()}
    facts["problems"] = [{"what": what, "do": do} for what, do in problems(facts, settings, now)]
    return facts


def _spending(spent: Spending, settings: Settings) -> Facts | None:
    """Return what was spent today, and the cap; None if there is no cap and nothing was spent."""
    cap = settings.spending.usd_per_day
    if cap is None and not spent.usd:
        return None
    sums = {"usd": spent.usd, "judges_usd": spent.judges_usd, "upstreams_usd": spent.upstreams_usd}
    return {"day": spent.day, **sums, "usd_per_day": cap, "is_reached": cap is not None and spent.usd >= cap}


def _stack(facts: Facts, settings: Settings) -> training.Stack:
    alive = {one["name"]: one["alive"] for one in facts["processes"]}
    # If the settings list servers, as in containers, `up` has started nothing.
    runs = alive.get("up", True) if facts["running"] else bool(settings.vllm.urls)
    return training.Stack(runs, alive.get("trainer"), facts["proxy"] and facts["proxy"]["url"], facts["phase"])


def _training(
    connection: Connection, row: Facts, stack: training.Stack, settings: Settings, now: datetime
) -> dict[str, Any]:
    """Return the gains of a policy, and why it does not train; None of one that another server answers."""
    step = row["last_step"]
    if row["upstream"] is not None:
        return {"gain": None, "training": None, "last_step": step and step | {"gain": None}}
    project, policy, live = row["project"], row["policy"], row["live_version"]
    of_step = [] if step is None or step["version_out"] is None else [step["version_in"], step["version_out"]]
    rewards = training_store.rewards(connection, project, policy, [0, live, *of_step])
    scored = training_store.scored(connection, project, policy)
    was_called = training_store.was_called(connection, project, policy)
    attempts = training.Attempts(
        held_out=partial(reward_store.held_out_rewards, connection, project, policy),
        training_prompts=partial(reward_store.training_prompts, connection, project, policy),
    )
    why = training.why_not(row, scored, was_called, settings.trainer, stack, now)
    uniform = training.uniform_groups(row, scored, settings.trainer) if why is not None and stack.runs else None
    return {
        "gain": training.gain(rewards, 0, live, attempts),
        "last_step": step
        and step | {"gain": training.gain(rewards, of_step[0], of_step[1], attempts) if of_step else None},
        "training": {
            "now": why is None,
            "why_not": why and why[0],
            "remedy": why and why[1],
            "uniform": uniform and {"what": uniform[0], "remedy": uniform[1]},
        },
    }
