"""Start vLLM and speak to it.

`launch` and `parsers` for its arguments, `client` for its routes, `self_test` for what it can do. `cpu_worker` and
`cpu_lora` run in vLLM's own process, in its CPU build.
"""
