"""Hold the values and pure rules that all of the proxy shares. No I/O.

`address` lists the paths that there are, and reads where the app says a call belongs; `call` is a served call, and
`stored_turn` what its record says to a later one; `chat_rules` is how a vLLM server makes a chat of Anthropic messages;
`policies` chooses the version that serves it and keeps a trajectory to it; `feedback` and `feedback_rows` are what apps
say of trajectories, `answer_ids` the names that they have for answers; `json_values` compares and bounds bodies;
`eviction` chooses what leaves memory first.
"""
