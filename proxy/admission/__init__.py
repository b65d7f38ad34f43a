"""Decide whether a request may come in, before its body is read.

`middleware` asks in this order: `origin` (host and web origin), `cors`, `api_keys` (with `api_key_store`), `scopes`,
`rate_limits`, `concurrency`. `request_id` names the request in the log and in the answer.
"""
