"""The proxy's SQL for held-out prompts: read which answers are due, and record the results."""

from datetime import UTC, datetime

from sqlalchemy import Engine, and_, select

from migrations import schema
from proxy.background.evaluations import DueAnswer
from whetstone.database.change_detector import Changes

SOME = 64

e, c, t = schema.evaluations.c, schema.completions.c, schema.trajectories.c


class EvaluationTables:
    """The queries of `evaluations`, for one project."""

    def __init__(self, engine: Engine, project: str, changes: Changes | None = None) -> None:
        self._engine = engine
        self._changes = changes or Changes(engine)
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = project
        self._due = and_(e.project == project, e.drawn_at.is_(None), e.error.is_(None))

    def due(self) -> list[DueAnswer]:
        """Return some due answers (`evaluations.Evaluations`)."""
        return self._changes.unless(("due", self._project), self._some_due)

    def _some_due(self) -> list[DueAnswer]:
        source = and_(c.project == e.project, c.id == e.source_id)
        trajectory = and_(t.project == c.project, t.id == c.trajectory_id)
        columns = (e.trajectory_id, e.group_id, e.policy, e.version, t.task, t.metadata, t.end_user)
        query = (
            select(*columns, c.new_messages, c.tools, c.sampling)
            .select_from(schema.evaluations.join(schema.completions, source).join(schema.trajectories, trajectory))
            .where(self._due)
            .limit(SOME)
        )
        with self._reader.connect() as connection:
            return [
                DueAnswer(*row[:7], messages=row.new_messages, tools=row.tools, sampling=row.sampling or {})
                for row in connection.execute(query)
            ]

    def is_due(self, trajectory_id: str) -> bool:
        """Return whether the answer is still due: not sampled meanwhile, and its test not ended
        (`evaluations.Evaluations`)."""
        query = select(e.trajectory_id).where(self._due, e.trajectory_id == trajectory_id)
        with self._reader.connect() as connection:
            return connection.execute(query).first() is not None

    def over(self, trajectory_id: str, error: str | None = None) -> None:
        """Record that the answer was sampled, or the error that prevents it (`evaluations.Evaluations`)."""
        values = {"drawn_at": datetime.now(UTC)} if error is None else {"error": error}
        this = schema.evaluations.update().where(self._due, e.trajectory_id == trajectory_id)
        with self._engine.begin() as connection:
            connection.execute(this.values(values))
