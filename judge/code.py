"""Reward functions on trajectories that have ended. Joins the sandbox and the tables; knows no SQL and no formula.

A batch is taken for a while (a lease: `code_due_at` moves into the future), run outside any transaction, and written
by who still holds it. A worker that dies in between costs that while; the functions then run again.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import Connection, Engine

from judge import store, store_code, store_groups
from judge.facts import Trajectory
from judge.parts import NotNumbers, parts_of, worth
from judge.record import record
from judge.sandbox import START_S, NotFound, SaidNothing, Sandbox
from judge.standing import given
from judge.store_code import Ran
from judge.trajectories import explained, failed, rewarded
from whetstone import tracing
from whetstone.worth import LearningSettings, RewardFunction

BATCH = 50
"""Trajectories taken at once: enough to share the start of a process among them."""
BUDGET_S = 20.0
"""A batch that ran for so long is written, and the rest of it left for the next."""
MARGIN_S = 30.0
"""A lease is longer than its batch by this: time for the database."""

Learning = Mapping[str, LearningSettings]

log = logging.getLogger(__name__)


def run_due(engine: Engine, learning: Learning, now: datetime) -> int:
    """Run the functions on one batch of trajectories that are due, and reward those; return how many were looked at.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. What was not written runs again when its lease is over.
    """
    until = now + timedelta(seconds=lease_s(learning))
    with engine.begin() as connection:
        due = store.code_due(connection, now, BATCH)
        for project, trajectories in due.items():
            store_code.due_from(connection, project, [one.id for one in trajectories], until)
    if not due:
        return 0
    ids = [one.id for trajectories in due.values() for one in trajectories]
    with tracing.span("reward functions", {tracing.TRAJECTORIES: ids}):
        ran = _run(engine, due, learning)
    with engine.begin() as connection:
        for project, trajectories in due.items():
            _write(connection, project, trajectories, ran[project], learning, until, now)
    return sum(map(len, ran.values()))


def lease_s(learning: Learning) -> float:
    """Longest that a batch may take, in seconds: its budget, then one trajectory by functions that all need all."""
    slowest = max((sum(START_S + one.timeout_s for one in policy.rewards) for policy in learning.values()), default=0)
    return BUDGET_S + slowest + MARGIN_S


def _run(engine: Engine, due: Mapping[str, list[Trajectory]], learning: Learning) -> dict[str, list[Ran]]:
    """What the functions say about as many of these as the budget allows, by project."""
    reader = engine.execution_options(isolation_level="AUTOCOMMIT")
    ends_at = time.monotonic() + BUDGET_S
    ran: dict[str, list[Ran]] = {project: [] for project in due}
    with ExitStack() as open_boxes:
        boxes = {
            policy: [(one, open_boxes.enter_context(Sandbox(one))) for one in settings.rewards]
            for policy, settings in learning.items()
        }
        failures: Counter[str] = Counter()
        for project, trajectory in ((project, one) for project, several in due.items() for one in several):
            if time.monotonic() >= ends_at:
                break
            with reader.connect() as connection:
                told = msgspec.json.encode(store_code.attempt(connection, project, trajectory))
            parts, errors, faults = _ask(boxes.get(trajectory.policy, []), told)
            failures.update(faults)
            ran[project].append(Ran(trajectory.id, parts, "; ".join(errors) or None))
    for fault, times in failures.items():
        log.warning("reward function %s (%d trajectories)", fault, times)
    return ran


def _ask(boxes: list[tuple[RewardFunction, Sandbox]], told: bytes) -> tuple[dict[str, float], list[str], list[str]]:
    """The parts that functions give, `name: why` of each that gives none, and as much of that as logs may have."""
    parts: dict[str, float] = {}
    errors, faults = [], []
    for function, box in boxes:
        try:
            parts |= parts_of(function.name, box.ask(told))
        except (SaidNothing, NotNumbers) as error:
            # Whatever a function says of itself: no text of a database holds a lone surrogate, PostgreSQL's no NUL.
            why = str(error).encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
            errors.append(f"{function.name}: {why}")
            # What it says of itself may quote what apps said.
            faults.append(errors[-1] if isinstance(error, NotFound) else f"{function.name}: {_kind(why)}")
    return parts, errors, faults


def _kind(why: str) -> str:
    """The class of a function's error, where it is one."""
    kind, colon, _ = why.partition(": ")
    return f"{kind}, code_error says more" if colon and kind.isidentifier() else "no number, code_error says why"


def _write(
    connection: Connection,
    project: str,
    taken: list[Trajectory],
    ran: list[Ran],
    learning: Learning,
    until: datetime,
    now: datetime,
) -> None:
    """Write what was said about those that are still held (until `until`), and give the rest back."""
    ids = [one.id for one in taken]
    groups = store.lock_groups(connection, project, store.groups_of(connection, project, ids))
    locked = store.lock_trajectories(connection, project, ids)
    held = {one.id: one for one in locked.values() if one.code_due_at == until}
    said = [one for one in ran if one.id in held]
    store_code.write(connection, project, said)
    store_code.due_from(connection, project, held.keys() - {one.id for one in said}, now)
    rewards = given(store.standing(connection, project, held, groups), held, learning)
    broken = store_groups.broken_off(connection, project, held)
    changed = []
    for one in said:
        before = replace(held[one.id], code_parts=one.code_parts, code_due_at=None)
        settings = learning.get(before.policy, LearningSettings())
        after = rewarded(worth(before, rewards.get(one.id), settings))
        after = failed(after, settings) if one.id in broken else after
        group = groups.get(after.group_id or "")
        changed.append(explained(after, group.state if group else None))
    record(connection, project, changed, groups, now)
