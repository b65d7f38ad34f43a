"""What Celery runs for the judge: `celery -A judge.tasks worker`. Reads the settings when imported."""

import asyncio
import functools
import logging
import threading
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from judge.code import run_due
from judge.retention import Retention
from judge.rollups import roll_up
from judge.sweep import sweep
from migrations.database import connect
from whetstone import tasks
from whetstone.broker import celery_app, hint, sweep_every
from whetstone.settings import load

RETAIN_EVERY_S = 60.0
"""How often it is looked for what is kept too long."""
ROLL_UP_EVERY_S = 5.0
"""How often what changed is added to the roll-ups: their views are exact anyway, but read each change by itself."""

settings = load()
app = celery_app(tasks.JUDGE_QUEUE, settings)
sweep_every(app, tasks.ASSEMBLE, settings.sweep_s)
sweep_every(app, tasks.RETAIN, RETAIN_EVERY_S)
sweep_every(app, tasks.ROLL_UP, ROLL_UP_EVERY_S)

log = logging.getLogger(__name__)
_running_code, _ranking, _retaining, _rolling_up = (threading.Lock() for _ in range(4))
_paused: dict[str, Any] = {}
"""Judges that are left alone for now."""


@functools.cache
def _engine() -> Engine:
    """This process's own: connections do not survive a fork."""
    return connect(settings.database_url)


@app.task(name=tasks.ASSEMBLE)
def assemble() -> None:
    """Apply waiting feedback, end idle trajectories, close and score groups; then tell the trainer what was scored."""
    try:
        swept = sweep(_engine(), settings.groups, datetime.now(UTC), settings.learning, settings.judges)
    except DBAPIError as error:
        # What was committed stands, and the next sweep goes on from there.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
        return
    if swept.scored:
        log.info("scored %d groups", swept.scored)
        hint(app, tasks.STEP)
    if swept.code:
        hint(app, tasks.CODE)
    if swept.ranking:
        hint(app, tasks.RANK)


@functools.cache
def _retention() -> Retention:
    return Retention(_engine(), settings.of_projects())


@app.task(name=tasks.RETAIN)
def retain() -> None:
    """Delete what is kept too long, and go on with deletions that are not over, one pass at a time in this process."""
    if not _retaining.acquire(blocking=False):
        return
    try:
        if _retention().work(datetime.now(UTC)):
            hint(app, tasks.ASSEMBLE)
    except DBAPIError as error:
        log.warning("the database did not answer, deletions go on later: %s", str(error.orig).strip())
    finally:
        _retaining.release()


@app.task(name=tasks.ROLL_UP)
def add_up() -> None:
    """Add what changed to the figures that dashboards read, one pass at a time in this process."""
    if not _rolling_up.acquire(blocking=False):
        return
    try:
        roll_up(_engine())
    except DBAPIError as error:
        log.warning("the database did not answer, figures are added up later: %s", str(error.orig).strip())
    finally:
        _rolling_up.release()


@app.task(name=tasks.CODE)
def code() -> None:
    """Run the reward functions that are due, then have the groups looked at whose trajectories they moved.

    A task of its own, and one at a time in this process: however slow a function is, another thread applies feedback.
    """
    if not _running_code.acquire(blocking=False):
        return
    try:
        while run_due(_engine(), settings.learning, datetime.now(UTC)):
            hint(app, tasks.ASSEMBLE)
    except DBAPIError as error:
        log.warning("the database did not answer, reward functions run again later: %s", str(error.orig).strip())
    finally:
        _running_code.release()


@app.task(name=tasks.RANK)
def rank() -> None:
    """Have judges rank the groups that are due for them, one pass at a time in this process."""
    if not _ranking.acquire(blocking=False):
        return
    try:
        # Imported here: of those who run no judge nobody is to load litellm.
        from judge.ruler.rank import rank_due

        while asyncio.run(rank_due(_engine(), settings, paused=_paused)):
            hint(app, tasks.ASSEMBLE)
    except DBAPIError as error:
        log.warning("the database did not answer, judges look again later: %s", str(error.orig).strip())
    finally:
        _ranking.release()
