"""Keep what the programs agree on: projects, policies, versions, adapters, keys.

`projects` prepares the database for the settings. `versions` (with `version_store`) moves versions and
`manual_moves` moves them by hand; `adapters` checks and loads their files, `adapter_copies` copies them.
`api_key_store` keeps keys, `bootstrap_key` the first one.
"""
