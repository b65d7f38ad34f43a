"""Find the trajectory that a call continues.

`resolver` takes the address that the app gave, else asks `prefix_index` by the hashes of `conversation_hash`, else
`store` in SQL; `retries` finds repeated calls, `peers` what other proxies of the same project placed.
"""
