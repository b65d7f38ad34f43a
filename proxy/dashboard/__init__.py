"""Show the dashboard at /ui, made on the server.

A request passes `middleware` (who is it, by `session`) and `app` to one of `pages`, which reads by `queries`, shapes
what it read with `views`, and is written by `rendering`, all in one of its threads. `interfaces` says what a page is;
`pagination`, `vocabulary`, `assets` and `error_page` help.
"""
