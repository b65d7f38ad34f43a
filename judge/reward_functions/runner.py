"""Run reward functions on trajectories that have ended, and store the rewards.

A batch is leased (`code_due_at` moves into the future), run outside any transaction, and written by the worker that
still has the lease. If a worker dies meanwhile, the functions run again when the lease is over.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import Connection, Engine

from judge.decisions.feedback import rewards_from_feedback
from judge.decisions.lifecycle import explained, failed, rewarded
from judge.decisions.model import Trajectory
from judge.decisions.reward_parts import NotNumbers, parts_of, worth
from judge.reward_functions import store as store_code
from judge.reward_functions.sandbox import START_S, NoReward, NotFound, Sandbox
from judge.settlement.sweep import record
from judge.store import groups as store_groups
from judge.store import unit_of_work
from whetstone.config.rewards import RewardFunction, RewardSettings
from whetstone.observability import tracing

BATCH = 50
"""Trajectories taken at once: enough to share the start of a process among them."""
BUDGET_S = 20.0
"""A batch that has run for this long is written, and its rest is left for the next."""
MARGIN_S = 30.0
"""A lease is longer than its batch by this: time for the database."""

Learning = Mapping[str, RewardSettings]

log = logging.getLogger(__name__)


def run_reward_functions(engine: Engine, learning: Learning, now: datetime) -> int:
    """Run the functions on one batch of due trajectories, and set their rewards; return the number of trajectories.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is unreachable. What was not written runs again when its lease is over.
    """
    until = now + timedelta(seconds=lease_s(learning))
    with engine.begin() as connection:
        due = unit_of_work.code_due(connection, now, BATCH)
        for project, trajectories in due.items():
            store_code.due_from(connection, project, [one.id for one in trajectories], until)
    if not due:
        return 0
    with tracing.span(
        "reward functions", {tracing.TRAJECTORIES: [one.id for several in due.values() for one in several]}
    ):
        ran = _run(engine, due, learning)
    with engine.begin() as connection:
        for project, trajectories in due.items():
            _write(connection, project, trajectories, ran[project], learning, until, now)
    return sum(map(len, ran.values()))


def lease_s(learning: Learning) -> float:
    """Return the longest time of a batch, in seconds.

    That is its budget, then one trajectory whose functions all use their full time, and a margin for the database.
    """
    slowest = max((sum(START_S + one.timeout_s for one in policy.rewards) for policy in learning.values()), default=0)
    return BUDGET_S + slowest + MARGIN_S


def _run(engine: Engine, due: Mapping[str, list[Trajectory]], learning: Learning) -> dict[str, list[store_code.Ran]]:
    """Return the functions' results, by project, for as many trajectories as the budget allows."""
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")
    ends_at = time.monotonic() + BUDGET_S
    ran: dict[str, list[store_code.Ran]] = {project: [] for project in due}
    with ExitStack() as open_boxes:
        boxes = {
            policy: [(one, open_boxes.enter_context(closing(Sandbox(one)))) for one in settings.rewards]
            for policy, settings in learning.items()
        }
        failures: Counter[str] = Counter()
        for project, trajectory in ((project, one) for project, several in due.items() for one in several):
            if time.monotonic() >= ends_at:
                break
            with reader.connect() as connection:
                payload = msgspec.json.encode(store_code.attempt(connection, project, trajectory))
            parts, errors, faults = _ask(boxes.get(trajectory.policy, []), payload)
            failures.update(faults)
            ran[project].append(store_code.Ran(trajectory.id, parts, "; ".join(errors) or None))
    for fault, times in failures.items():
        log.warning("reward function %s (%d trajectories)", fault, times)
    return ran


def _ask(boxes: list[tuple[RewardFunction, Sandbox]], payload: bytes) -> tuple[dict[str, float], list[str], list[str]]:
    """Return the functions' parts, `name: why` for each function without a result, and its version for the log."""
    parts: dict[str, float] = {}
    errors, faults = [], []
    for function, box in boxes:
        try:
            parts |= parts_of(function.name, box.ask(payload))
        except (NoReward, NotNumbers) as error:
            # The message may contain anything: no database stores a lone surrogate, and PostgreSQL stores no NUL.
            why = str(error).encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
            errors.append(f"{function.name}: {why}")
            # The message may quote an app's data, so it is not logged.
            faults.append(errors[-1] if isinstance(error, NotFound) else f"{function.name}: {_kind(why)}")
    return parts, errors, faults


def _kind(why: str) -> str:
    """Return the class of a function's error, where there is one."""
    kind, colon, _ = why.partition(": ")
    return f"{kind}, code_error says more" if colon and kind.isidentifier() else "no number, code_error says why"


def _write(
    connection: Connection,
    project: str,
    taken: list[Trajectory],
    ran: list[store_code.Ran],
    learning: Learning,
    until: datetime,
    now: datetime,
) -> None:
    """Write the results for trajectories whose lease is still ours (until `until`), and release the rest."""
    ids = [one.id for one in taken]
    groups = unit_of_work.lock_groups(connection, project, unit_of_work.groups_of(connection, project, ids))
    locked = unit_of_work.lock_trajectories(connection, project, ids)
    leased = {one.id: one for one in locked.values() if one.code_due_at == until}
    written = [one for one in ran if one.id in leased]
    store_code.write(connection, project, written)
    store_code.due_from(connection, project, leased.keys() - {one.id for one in written}, now)
    rewards = rewards_from_feedback(unit_of_work.standing(connection, project, leased, groups), leased, learning)
    broken = store_groups.broken_off(connection, project, leased)
    changed = []
    for one in written:
        before = replace(leased[one.id], code_parts=one.code_parts, code_due_at=None)
        settings = learning.get(before.policy, RewardSettings())
        after = rewarded(worth(before, rewards.get(one.id), settings))
        after = failed(after, settings) if one.id in broken else after
        group = groups.get(after.group_id or "")
        changed.append(explained(after, group.state if group else None))
    record(connection, project, changed, groups, now)
