"""The judge's Celery tasks: `celery -A judge.tasks worker`. Reads the settings when imported."""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from judge.maintenance.retention import Retention
from judge.maintenance.rollups import roll_up
from judge.reward_functions.runner import run_reward_functions
from judge.settlement.sweep import sweep
from whetstone.config.settings import load
from whetstone.database.engine import connect
from whetstone.messaging import task_names
from whetstone.messaging.celery_app import celery_app, hint, sweep_every

RETAIN_EVERY_S = 60.0
"""How often to check for data that has passed its retention time."""
ROLL_UP_EVERY_S = 5.0
"""How often changes are added to the roll-ups: the views are exact anyway, but read each later change by itself."""

settings = load()
app = celery_app(task_names.JUDGE_QUEUE, settings)
sweep_every(app, task_names.ASSEMBLE, settings.sweep_s)
sweep_every(app, task_names.RETAIN, RETAIN_EVERY_S)
sweep_every(app, task_names.ROLL_UP, ROLL_UP_EVERY_S)

log = logging.getLogger(__name__)
_paused: dict[str, Any] = {}
"""Judges that are paused."""


@functools.cache
def _engine() -> Engine:
    """Return this process's own engine: connections do not survive a fork."""
    return connect(settings.database_url)


def _one_at_a_time(later: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a task run once at a time in this process; where the database does not answer, log what happens `later`."""

    def exclusive(work: Callable[[], None]) -> Callable[[], None]:
        lock = threading.Lock()

        @functools.wraps(work)
        def run() -> None:
            if not lock.acquire(blocking=False):
                return
            try:
                work()
            except DBAPIError as error:
                log.warning("the database did not answer, %s: %s", later, str(error.orig).strip())
            finally:
                lock.release()

        return run

    return exclusive


@app.task(name=task_names.ASSEMBLE)
def assemble() -> None:
    """Apply waiting feedback, end idle trajectories, close and score groups; then notify the trainer of them."""
    try:
        swept = sweep(_engine(), settings.groups, datetime.now(UTC), settings.learning, settings.judges)
    except DBAPIError as error:
        # What was committed stays, and the next sweep continues from there.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
        return
    if swept.scored:
        log.info("scored %d groups", swept.scored)
    tasks = {task_names.STEP: swept.scored, task_names.CODE: swept.code, task_names.RANK: swept.ranking}
    for name in (name for name, is_due in tasks.items() if is_due):
        hint(app, name)


@functools.cache
def _retention() -> Retention:
    return Retention(_engine(), settings.of_projects())


@app.task(name=task_names.RETAIN)
@_one_at_a_time("deletions go on later")
def retain() -> None:
    """Delete data past its retention time, and continue unfinished deletions."""
    if _retention().work(datetime.now(UTC)):
        hint(app, task_names.ASSEMBLE)


@app.task(name=task_names.ROLL_UP)
@_one_at_a_time("figures are added up later")
def add_up() -> None:
    """Add changes to the figures that dashboards read."""
    roll_up(_engine())


@app.task(name=task_names.CODE)
@_one_at_a_time("reward functions run again later")
def code() -> None:
    """Run the reward functions that are due, then sweep the groups of the changed trajectories.

    It is a task of its own: however slow a function is, another thread applies feedback.
    """
    while run_reward_functions(_engine(), settings.learning, datetime.now(UTC)):
        hint(app, task_names.ASSEMBLE)


@app.task(name=task_names.RANK)
@_one_at_a_time("judges look again later")
def rank() -> None:
    """Have judges rank the groups that are due for them."""
    # Imported here: installations without a judge must not load litellm.
    from judge.ruler.ranker import rank_due

    while asyncio.run(rank_due(_engine(), settings, paused=_paused)):
        hint(app, task_names.ASSEMBLE)
