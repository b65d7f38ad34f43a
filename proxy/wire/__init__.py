"""Translate between each dialect's bytes and vLLM's. A dialect is one form of the API. Pure: no socket, no table.

`registry` names the dialects: `chat`, `completions`, `anthropic`, `responses`. A request's bytes go through
`request_body`, which also says what sampling cannot be trained on, and its dialect to the bytes for vLLM; an answer
goes back through the dialect, and through `sse` while it streams. `interfaces` says what every dialect has to offer,
and takes token ids and logprobs out. `translated`: it becomes a chat request, so that token ids are captured;
`passthrough`: it goes to vLLM's own route as it came.
"""
