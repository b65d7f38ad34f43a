"""Manage reader roles: roles of PostgreSQL that can select from the admin views, and from nothing else.

On SQLite everyone who can open the file can read it. When a migration recreates a view, the view loses its grants:
`granted` reads them before, `restore` grants them again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, text

from migrations.views import VIEWS

MADE_BY_US = "reads the admin views of Whetstone, and nothing else"
"""The comment that marks our roles: no other role is changed or dropped."""
NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
"""Names that need no quotes."""


@dataclass(frozen=True)
class Grants:
    """The grants before a migration: the admin views that existed, and pairs of view and role."""

    views: frozenset[str]
    pairs: frozenset[tuple[str, str]]


class RoleRefused(Exception):
    """The role is not changed; the message says why, and what to do."""


def granted(connection: Connection) -> Grants:
    """Return the roles other than the owner that may read admin views of this schema; none on SQLite."""
    if connection.dialect.name != "postgresql":
        return Grants(frozenset(), frozenset())
    query = """
        SELECT c.relname, r.rolname
        FROM pg_class AS c
        CROSS JOIN aclexplode(c.relacl) AS a
        LEFT JOIN pg_roles AS r ON r.oid = a.grantee
        WHERE c.relkind = 'v' AND c.relnamespace = CAST(current_schema() AS regnamespace)
          AND starts_with(c.relname, 'admin_') AND a.privilege_type = 'SELECT' AND a.grantee <> c.relowner
    """
    grants = connection.execute(text(query))
    return Grants(frozenset(_views(connection)), frozenset((view, role or "PUBLIC") for view, role in grants))


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
    own, schema = _quoted(connection, role), _quoted(connection, _one(connection, "SELECT current_schema()"))
    database = _quoted(connection, _one(connection, "SELECT current_database()"))
    made = "ALTER" if exists else "CREATE"
    timeout_ms = 0 if timeout_s is None else round(timeout_s * 1000)
    return [
        f"{made} ROLE {own} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION PASSWORD {_literal(password)}",
        f"COMMENT ON ROLE {own} IS {_literal(MADE_BY_US)}",
        f"ALTER ROLE {own} SET default_transaction_read_only = on",
        f"ALTER ROLE {own} SET statement_timeout = {timeout_ms}",
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
    own, schema = _quoted(connection, role), _quoted(connection, _one(connection, "SELECT current_schema()"))
    database = _quoted(connection, _one(connection, "SELECT current_database()"))
    for statement in (
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {own}",
        f"REVOKE ALL ON SCHEMA {schema} FROM {own}",
        f"REVOKE ALL ON DATABASE {database} FROM {own}",
        f"DROP ROLE {own}",
    ):
        connection.exec_driver_sql(statement)


def sees_too_much(connection: Connection, role: str) -> Sequence[str]:
    """Return, in words, what else the role may do, because this server allows it to everyone."""
    allowed = []
    creates = "SELECT has_schema_privilege(:role, current_schema(), 'CREATE')"
    if connection.execute(text(creates), {"role": role}).scalar():
        allowed.append("make tables of its own (REVOKE CREATE ON SCHEMA public FROM PUBLIC ends that)")
    query = """
        SELECT c.relname FROM pg_class AS c
        WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND c.relnamespace = CAST(current_schema() AS regnamespace)
          AND has_table_privilege(:role, c.oid, 'SELECT') AND NOT c.relname = ANY(:views)
        ORDER BY 1
    """
    others = connection.execute(text(query), {"role": role, "views": [view.name for view in VIEWS]}).scalars().all()
    allowed += [f"read {name} (REVOKE ALL ON {name} FROM PUBLIC ends that)" for name in others]
    return allowed


def _is_ours(connection: Connection, role: str) -> bool:
    query = "SELECT shobj_description(oid, 'pg_authid') FROM pg_roles WHERE rolname = :role"
    row = connection.execute(text(query), {"role": role}).first()
    if row is not None and row[0] != MADE_BY_US:
        raise RoleRefused(f"there is a role {role} already, and it is none of ours: choose another name")
    return row is not None


def _views(connection: Connection) -> list[str]:
    query = """
        SELECT viewname FROM pg_views WHERE schemaname = current_schema() AND starts_with(viewname, 'admin_') ORDER BY 1
    """
    return list(connection.execute(text(query)).scalars())


def _one(connection: Connection, query: str) -> str:
    return str(connection.execute(text(query)).scalar_one())


def _quoted(connection: Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(name)


def _literal(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"
