"""Reach the database: SQLite or PostgreSQL. Knows none of our tables.

`engine` connects; `bulk` (and `bulk_sqlite`) writes many rows at once; `types` are column types, `sanitize` makes text
storable, `postgres_stats` analyses tables that grew, `change_detector` detects writes by other processes.
"""
