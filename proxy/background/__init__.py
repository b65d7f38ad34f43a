"""Sample what no app waits for.

`sampler` asks vLLM with a lower priority than apps, for `shadow_groups` (with `shadow_store`) and `evaluations` (with
`evaluation_store`).
"""
