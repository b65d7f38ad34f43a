"""Delete data that has passed its retention time, and continue deletions that waited for a step or were interrupted."""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Engine

from whetstone.config.settings import Settings
from whetstone.privacy.eraser import erasing, old_of, resume, run
from whetstone.privacy.store import Target, find, unfinished

LEFT_ALONE = timedelta(minutes=1)
"""The process that started a deletion continues it for this long; after that, this one does."""

log = logging.getLogger(__name__)


class Retention:
    """Makes one pass after another, in one process."""

    def __init__(self, engine: Engine, projects: Iterable[Settings]) -> None:
        """`projects`: the settings of each project."""
        self._engine = engine
        self._keep_days = {one.project: one.privacy.keep_days for one in projects}
        self._done: set[Target] = set()
        """Retention targets (whole hours) that are done."""

    def work(self, now: datetime) -> int:
        """Delete what is due; return the number of deletions.

        Raises:
            sqlalchemy.exc.DBAPIError: the database is unreachable. Committed work stays, and the next pass continues.
        """
        return sum(self._go_on(project, now) + self._too_old(project, now) for project in self._keep_days)

    def _go_on(self, project: str, now: datetime) -> int:
        with self._engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            erasures = unfinished(connection, project, now - LEFT_ALONE)
        # A user's deletion cannot continue before its data was selected, as only the request names the user: it must be
        # repeated.
        known = [one for one in erasures if one.kind != "user" or one.waits_for is not None]
        for erasure in known:
            run(self._engine, resume(erasure, now))
        return len(known)

    def _too_old(self, project: str, now: datetime) -> int:
        keep_days = self._keep_days[project]
        if keep_days is None or (target := old_of(project, keep_days, now)) in self._done:
            return 0
        with self._engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            some = find(connection, target, now)
        if some:
            row = run(self._engine, erasing(target, now))
            log.info("project %s: %d trajectories were older than %g days", project, row["trajectories"], keep_days)
        self._done = {one for one in self._done if one.project != project} | {target}
        return bool(some)
