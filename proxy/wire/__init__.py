"""Translate between each dialect's bytes and vLLM's. Pure: no socket, no table.

`registry` names the dialects: `chat`, `completions`, `anthropic`, `responses`. A request's bytes go through
`request_body` and its dialect to the bytes for vLLM; an answer goes back through the dialect, or through `chunk_stream`
and `sse` while it streams. `interfaces` says what every dialect has to offer, `translated` and `passthrough` are the
two ways to offer it. `tokens` takes token ids and logprobs out; `trainable_sampling` says what cannot be trained on.
"""
