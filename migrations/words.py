"""The words of an answer. They are stored once: in `response`, or in `response_text` where no string there says them.

One expression for all who read them from the table; the view `admin_completions` tells the same.
"""

from typing import Any

from sqlalchemy import Text, func
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from migrations.schema import completions


class _Content(FunctionElement[str]):
    """The string that a JSON object has at `content`; NULL where it has another value there, or none."""

    type = Text()
    inherit_cache = True


@compiles(_Content, "sqlite")
def _of_sqlite(element: _Content, compiler: SQLCompiler, **how: Any) -> str:
    told = compiler.process(element.clauses, **how)
    # What is nested too deeply for SQLite would fail whoever reads any row; of a list json_extract tells JSON text.
    return (
        f"CASE WHEN NOT json_valid({told}) THEN NULL "
        f"WHEN json_type({told}, '$.content') = 'text' THEN json_extract({told}, '$.content') END"
    )


@compiles(_Content, "postgresql")
def _of_postgresql(element: _Content, compiler: SQLCompiler, **how: Any) -> str:
    told = compiler.process(element.clauses, **how)
    return f"CASE WHEN jsonb_typeof({told} -> 'content') = 'string' THEN {told} ->> 'content' END"


response_text = func.coalesce(completions.c.response_text, _Content(completions.c.response)).label("response_text")
"""What the answer of a row of `completions` says; NULL where that is no text."""
