"""Sample what no app waits for.

`sampler` asks vLLM behind all apps, for `shadow_groups` (with `shadow_store`) and `evaluations` (with
`evaluation_store`).
"""
