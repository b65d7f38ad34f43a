"""Ask the database: one query of the user's, read-only. Knows how to forbid writing; no query of its own."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError

from migrations.database import connect


class QueryFailed(Exception):
    """The database did not answer; the message is its own."""


def ask(url: str, sql: str) -> tuple[list[str], list[Sequence[Any]]]:
    """Run one query and give its columns and rows. Whatever it tries to write is refused by the database.

    Raises:
        QueryFailed: it is no query, or it writes, or the database is away.
    """
    forbid = "PRAGMA query_only = ON"
    if make_url(url).get_backend_name() == "postgresql":
        forbid = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
    engine = connect(url).execution_options(isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(forbid))
            # As it stands: a colon in it is a colon, not a parameter.
            result = connection.execute(text(sql.replace(":", r"\:")))
            if not result.returns_rows:
                raise QueryFailed("that is no query: it gives no rows")
            return list(result.keys()), [tuple(row) for row in result]
    except SQLAlchemyError as error:
        raise QueryFailed(str(getattr(error, "orig", None) or error).strip()) from error
    finally:
        # The connection must not go back to a pool: it can no longer write.
        engine.dispose()
