"""Manage reader roles: roles of PostgreSQL that can select from the admin views, and from nothing else.

On SQLite everyone who can open the file can read it. When a migration recreates a view, the view loses its grants:
`granted` reads them before, `restore` grants them again.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Connection, inspect, text

from migrations.views import VIEWS

MADE_BY_US = "reads the admin views of Whetstone, and nothing else"
"""The comment that marks our roles: no other role is changed or dropped."""
NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""Names that need no quotes."""


class Grants(NamedTuple):
    """The grants before a migration."""

    views: set[str]
    """The admin views that existed."""
    pairs: set[tuple[str, str]]
    """View and role."""


class RoleRefused(Exception):
    """The role is not changed; the message says why, and what to do."""


def granted(connection: Connection) -> Grants:
    """Return which roles other than the owner may read admin views of this schema; none on SQLite."""
    if connection.dialect.name != "postgresql":
        return Grants(set(), set())
    query = """
        SELECT c.relname, r.rolname
        FROM pg_class AS c
        CROSS JOIN aclexplode(c.relacl) AS a
        LEFT JOIN pg_roles AS r ON r.oid = a.grantee
        WHERE c.relkind = 'v' AND c.relnamespace = CAST(current_schema() AS regnamespace)
          AND starts_with(c.relname, 'admin_') AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
    """
    pairs = {(row.relname, row.rolname or "PUBLIC") for row in connection.execute(text(query))}
    return Grants(set(_views(connection)), pairs)


def restore(connection: Connection, before: Grants) -> None:
    """Grant each role the views that it could read; a role that could read all of them also gets the new views."""
    there = _views(connection)
    for role in sorted({role for _, role in before.pairs}):
        own = {view for view, one in before.pairs if one == role}
        readable = there if own >= before.views else [view for view in there if view in own]
        if readable:
            who = role if role == "PUBLIC" else _quoted(connection, role)
            connection.execute(text(f"GRANT SELECT ON {', '.join(readable)} TO {who}"))


def statements(connection: Connection, role: str, password: str, timeout_s: float | None, *, exists: bool) -> list[str]:
    """Return the statements that create the reader `role`, or update one that exists. `password`: its text or its SCRAM
    hash."""
    own, schema, database = _names(connection, role)
    made = "ALTER" if exists else "CREATE"
    return [
        f"{made} ROLE {own} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {_literal(password)}",
        f"COMMENT ON ROLE {own} IS {_literal(MADE_BY_US)}",
        f"ALTER ROLE {own} SET default_transaction_read_only = on",
        f"ALTER ROLE {own} SET statement_timeout = {round((timeout_s or 0) * 1000)}",
        f"ALTER ROLE {own} SET timezone = 'UTC'",
        f"GRANT CONNECT ON DATABASE {database} TO {own}",
        f"GRANT USAGE ON SCHEMA {schema} TO {own}",
        f"GRANT SELECT ON {', '.join(view.name for view in VIEWS)} TO {own}",
    ]


def make(connection: Connection, role: str, password: str, timeout_s: float | None) -> bool:
    """Create a reader, or give one of ours a new password and the new views. Return whether it is new.

    Raises:
        RoleRefused: a role with this name exists that we did not create.
    """
    exists = _is_ours(connection, role)
    for statement in statements(connection, role, password, timeout_s, exists=exists):
        connection.exec_driver_sql(statement)
    return not exists


def drop(connection: Connection, role: str) -> None:
    """Drop a reader.

    Raises:
        RoleRefused: no role has this name, or we did not create it.
    """
    if not _is_ours(connection, role):
        raise RoleRefused(f"there is no role {role}")
    own, schema, database = _names(connection, role)
    for statement in (
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {own}",
        f"REVOKE ALL ON SCHEMA {schema} FROM {own}",
        f"REVOKE ALL ON DATABASE {database} FROM {own}",
        f"DROP ROLE {own}",
    ):
        connection.exec_driver_sql(statement)


def sees_too_much(connection: Connection, role: str) -> Sequence[str]:
    """Return, in words, what else the role may do, because this server allows it to everyone."""
    creates = text("SELECT has_schema_privilege(:role, current_schema(), 'CREATE')")
    allowed = ["make tables of its own (REVOKE CREATE ON SCHEMA public FROM PUBLIC ends that)"]
    query = """
        SELECT c.relname FROM pg_class AS c
        WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace = CAST(current_schema() AS regnamespace)
          AND has_table_privilege(:role, c.oid, 'SELECT') AND NOT c.relname = ANY(:views)
        ORDER BY 1
    """
    others = connection.scalars(text(query), {"role": role, "views": [view.name for view in VIEWS]})
    return [
        *(allowed if connection.scalar(creates, {"role": role}) else []),
        *(f"read {name} (REVOKE ALL ON {name} FROM PUBLIC ends that)" for name in others),
    ]


def _is_ours(connection: Connection, role: str) -> bool:
    row = connection.execute(
        text("SELECT shobj_description(oid, 'pg_authid') FROM pg_roles WHERE rolname = :role"), {"role": role}
    ).first()
    if row is not None and row[0] != MADE_BY_US:
        raise RoleRefused(f"there is a role {role} already, and it is none of ours: choose another name")
    return row is not None


def _views(connection: Connection) -> list[str]:
    # Named, since without a schema it lists the views of the whole search path.
    views = inspect(connection).get_view_names(schema=connection.dialect.default_schema_name)
    return [name for name in sorted(views) if name.startswith("admin_")]


def _names(connection: Connection, role: str) -> tuple[str, str, str]:
    """Return the role, the current schema and the current database as they are written in statements."""
    schema, database = connection.execute(text("SELECT current_schema(), current_database()")).one()
    return _quoted(connection, role), _quoted(connection, schema), _quoted(connection, database)


def _quoted(connection: Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(name)


def _literal(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"
