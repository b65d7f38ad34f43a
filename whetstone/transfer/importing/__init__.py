"""Read logs of other tools.

`importer` reads lines as `schema` says, `rows` finds which conversation continues which, and `store` writes them.
"""
