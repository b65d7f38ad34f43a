"""Decide whether a request may come in, before its body is read.

`middleware` checks the host and web origin (CORS), asks `api_keys` (with `api_key_store`) whose key it is and which
scope it needs, `feedback_tokens` (with `token_secrets`) what a web page may rate, and `rate_limits` for the key's rate,
and finds room in flight. It also names the request in the log and the answer.
"""
