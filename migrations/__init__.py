"""What is remembered: the tables as they are (`schema`), the way to them (`versions/`), the engine that reaches them.

Knows no program of ours; every program may import it.
"""
