"""Serve `/admin`: `policies` with their versions, `keys`, and deletions in `privacy`; `store` is their SQL."""
