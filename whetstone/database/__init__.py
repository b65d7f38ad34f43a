"""Reach the database: SQLite or PostgreSQL. Knows none of our tables.

`engine` connects; `bulk` (and `bulk_sqlite`) writes many rows at once; `types` are column types, and make values
storable; `postgres_stats` analyses tables that grew, `change_detector` detects writes by other processes.
"""
