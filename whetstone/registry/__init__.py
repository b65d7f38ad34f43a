"""Hold what the programs agree on in SQL: projects, policies, versions, adapters, keys.

`projects` prepares the database for the settings. `versions` (with `version_store`) makes versions live and
`manual_moves` does it for an administrator; `handover` sets which share of the requests a policy answers while a model
of another server answers the others. `adapters` checks, loads and copies their files.
`remote` brings them to other machines by an adapter store.
`api_key_store` stores keys, the first one before a proxy listens. `completion_store` finds the completions that apps
name in feedback. `reward_store` reads the rewards by which versions are compared,
`spending` what other companies' servers cost.
"""
