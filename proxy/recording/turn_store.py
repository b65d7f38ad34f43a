"""The proxy's SQL for a whole conversation: read what its turns added, back along `follows`. Reads only."""

from typing import Any

from sqlalchemy import Connection, select

from migrations import schema

c = schema.completions.c
_COLUMNS = (c.follows, c.new_messages, c.tools, c.response, c.prompt_token_ids, c.token_ids, c.sampling, c.explored)


def turns_to(connection: Connection, project: str, completion_id: str | None) -> list[Any]:
    """Return the completions that make up the conversation of this one, the oldest first; an empty list for None."""
    turns: list[Any] = []
    while completion_id is not None:
        row = connection.execute(select(*_COLUMNS).where(c.project == project, c.id == completion_id)).one()
        turns.append(row)
        completion_id = row.follows
    return turns[::-1]
