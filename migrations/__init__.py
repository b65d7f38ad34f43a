"""Define the tables, and move databases to them.

`schema` and `schema_rollups` are the tables as they are, `views` what admins read, `versions` the way to them, which
`run` goes; `readers` makes roles that may read, `words` finds an answer's words.
"""
