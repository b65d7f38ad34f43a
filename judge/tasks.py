"""What Celery runs for the judge: `celery -A judge.tasks worker`. Reads the settings when imported."""

import functools
import logging
from datetime import UTC, datetime

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from judge.sweep import sweep
from migrations.database import connect
from whetstone import tasks
from whetstone.broker import celery_app, hint, sweep_every
from whetstone.settings import load

settings = load()
app = celery_app(tasks.JUDGE_QUEUE, settings)
sweep_every(app, tasks.ASSEMBLE, settings.sweep_s)

log = logging.getLogger(__name__)


@functools.cache
def _engine() -> Engine:
    """This process's own: connections do not survive a fork."""
    return connect(settings.database_url)


@app.task(name=tasks.ASSEMBLE)
def assemble() -> None:
    """Apply waiting feedback, end idle trajectories, close and score groups; then tell the trainer what was scored."""
    try:
        swept = sweep(_engine(), settings.groups, datetime.now(UTC))
    except DBAPIError as error:
        # What was committed stands, and the next sweep goes on from there.
        log.warning("the database did not answer, the next sweep tries again: %s", str(error.orig).strip())
        return
    if swept.scored:
        log.info("scored %d groups", swept.scored)
        hint(app, tasks.STEP)
