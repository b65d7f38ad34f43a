"""Record what was served and said: redacted, journalled, then in SQL.

`recorder` takes a call, `redaction` (with `redaction_presets`) removes what is private, `journal` keeps it until
`writer` has committed it. `prefix_delta` and `rows` give the stored form; `store` and its parts `call_store`,
`turn_store`, `tail_cache`, `retry_store` and `erased_store` write and read it; `reason_store` says why a trajectory
was not trained on.
"""
