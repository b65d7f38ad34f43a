"""Read logs of other tools.

`importer` reads lines as `schema` says, `threads` finds conversations, `rows` and `store` keep them.
"""
