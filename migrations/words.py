"""Extract the text of an answer. It is stored once: in `response`, or in `response_text` if no string in `response` has
it.

All readers of the table use this one expression; the view `admin_completions` returns the same.
"""

from typing import Any

from sqlalchemy import Text, func
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from migrations.schema import completions


class _Content(FunctionElement[str]):
    """The string at `content` of a JSON object; NULL if it has another value there, or none."""

    type = Text()
    inherit_cache = True


@compiles(_Content, "sqlite")
def _of_sqlite(element: _Content, compiler: SQLCompiler, **how: Any) -> str:
    json = compiler.process(element.clauses, **how)
    # Without the check, JSON nested too deeply for SQLite would fail every reader of any row. For a list, json_extract
    # would return JSON text.
    return (
        f"CASE WHEN NOT json_valid({json}) THEN NULL "
        f"WHEN json_type({json}, '$.content') = 'text' THEN json_extract({json}, '$.content') END"
    )


@compiles(_Content, "postgresql")
def _of_postgresql(element: _Content, compiler: SQLCompiler, **how: Any) -> str:
    json = compiler.process(element.clauses, **how)
    return f"CASE WHEN jsonb_typeof({json} -> 'content') = 'string' THEN {json} ->> 'content' END"


response_text = func.coalesce(completions.c.response_text, _Content(completions.c.response)).label("response_text")
"""The text of a row of `completions`; NULL if it is no text."""
