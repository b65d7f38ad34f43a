"""Find the trajectory that a call continues.

`resolver` takes the address that the app gave, else asks `indexes` in memory, by the hashes of `conversation_hash` or,
for a repeated call, by its request; else `store` in SQL. `rewriting` recognises an answer that the app sends back in
other words. `peers`: what other proxies of the same project placed.
"""
