"""Serve `/admin`: `policies`, `versions`, `keys`, and deletions in `privacy`; `store` is their SQL."""
