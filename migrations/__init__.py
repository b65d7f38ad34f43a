"""Define the tables, and move databases to them.

`schema` and `schema_rollups` are the tables as they are, `views` what admins read. `versions` is the way to them, which
`run` goes: it begins with one revision for all of the first release, whose frozen texts are in `initial_views` and
`initial_rollups`. `readers` makes roles that may read, `words` finds an answer's words.
"""
