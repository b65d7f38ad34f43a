"""Start vLLM and speak to it.

`launch` and `parsers` for its arguments, `client` for its routes, `self_test` for what it can do.
"""
