"""Back up a stack into one file while it runs, and restore it.

`create` copies the journal, then the database (`sqlite` or `postgresql`), then the adapters that the copy names, into
an `archive`. `restore` verifies an archive, and puts its parts into an empty data folder and an empty database. `rows`
reads a copy's schema revision, counts and adapters.
"""
