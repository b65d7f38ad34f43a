"""Define the tables, and move databases to them.

`schema` and `schema_rollups` are the tables as they are, `views` what admins read. `run` moves a database through the
revisions in `versions`: they begin with one for all of the first release, whose frozen texts are in `initial_views` and
`initial_rollups`. `readers` makes roles that may only read; `words` is the SQL for the text of an answer.
"""
