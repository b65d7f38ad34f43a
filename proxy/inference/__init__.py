"""Serve one completion: the story of a call, from its bytes to its last byte out.

`endpoint` reads the request, places it, chooses a version, asks vLLM, relays the answer and records it. `context` is
the call while this goes on, `completion` how it ends and its line in the log, `idempotency` the answer to a repeated
request. `stored_responses` finds earlier answers by the ids that requests refer to. `passthrough` serves what samples
nothing (embeddings, token counts).
"""
