"""Hold what the programs agree on in SQL: projects, policies, versions, adapters, keys.

`projects` prepares the database for the settings. `versions` (with `version_store`) makes versions live and
`manual_moves` does it for an administrator; `adapters` checks their files, `adapter_copies` copies them.
`api_key_store` stores keys, `bootstrap_key` the first one.
"""
