"""Translate between each dialect's bytes and vLLM's. A dialect is one form of the API. Pure: no socket, no table.

`registry` names the dialects: `chat`, `completions`, `anthropic`, `responses`. A request's bytes go through
`request_body`, and its dialect to the bytes for vLLM; `parameters` tells what its fields do to the sampling. An answer
goes back through the dialect; `decoding` splits a stream into events, and reads token ids and logprobs. `interfaces`
says what every dialect has to offer. `translated`: it becomes a chat request, so that token ids are captured;
`passthrough`: it goes to vLLM's own route as it came.
"""
