"""Record calls and feedback: redacted, in the journal on disk, then in SQL.

`recorder` takes both, `redaction` (with `redaction_presets` and `media`) removes what is private, `journal` holds them
until `writer` has committed them; the app is answered once they are in the journal. The writer stores feedback by
`store` and calls by `call_store`, in the form that `prefix_delta` and `rows` give. `turn_store` reads what earlier
turns of a conversation were, `response_store` the same for an answer that an app names, `retry_store` the calls that an
app repeats; `reason_store` is the SQL that says why a trajectory is not trained on.
"""
