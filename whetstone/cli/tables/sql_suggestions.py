"""Suggest the right name for one that the database does not know, among the admin views and their tables."""

import difflib
import re

from migrations import schema
from migrations.views import BY_NAME

_UNKNOWN_TABLE = re.compile(r'no such table: (\S+)|relation "([^"]+)" does not exist')
_UNKNOWN_COLUMN = re.compile(r'no such column: (\S+)|column "?([^"\s]+)"? does not exist')
_SECOND = re.compile(r"only execute one statement|multiple commands|one statement at a time")


def advice(message: str, sql: str) -> str:
    """Return advice to append to the database's error `message`; empty if there is none."""
    if match := _UNKNOWN_TABLE.search(message):
        return _of_table(_bare(match[1] or match[2]))
    if match := _UNKNOWN_COLUMN.search(message):
        return _of_column(_bare(match[1] or match[2]), sql)
    if _SECOND.search(message):
        return "; ask one query at a time"
    return ""


def _of_table(name: str) -> str:
    if name in BY_NAME or name in schema.metadata.tables:
        return ". This database is of an earlier version: `whetstone migrate` brings it to this one"
    there = [*BY_NAME, *schema.metadata.tables]
    # People often omit the prefix that all views share.
    nearest = [one for one in (f"admin_{name}", f"admin_{name}s") if one in BY_NAME] or _nearest(name, there)
    meant = f". Did you mean {nearest[0]}?" if nearest else "."
    return f"{meant} `whetstone sql` lists the views"


def _of_column(name: str, sql: str) -> str:
    views = [view for view in BY_NAME if re.search(rf"\b{view}\b", sql, re.IGNORECASE)]
    if not views:
        return ""
    columns = list(dict.fromkeys(column.name for view in views for column in BY_NAME[view].columns))
    if name in columns:
        return f"; it is one of {', '.join(views)}: is its name in front of it right, or the database older?"
    nearest = _nearest(name, columns)
    meant = f". Did you mean {nearest[0]}?" if nearest else "."
    return f"{meant} `whetstone sql {views[0]}` lists its columns"


def _nearest(name: str, among: list[str]) -> list[str]:
    return difflib.get_close_matches(name.lower(), among, n=1, cutoff=0.5)


def _bare(name: str) -> str:
    return name.rsplit(".", 1)[-1].strip('"')
