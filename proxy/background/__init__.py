"""Sample what no app waits for.

`sampler` asks vLLM with a lower priority than apps, for `shadow_groups` and `evaluations`, whose SQL is in `store`.
`comparisons` sends what a person compares, by the route that apps use.
"""
