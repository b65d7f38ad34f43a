"""Hold the values and pure rules that all of the proxy shares. No I/O.

`call` is a served call, `address` where the app says it belongs; `policies` chooses the version that serves it
and `version_pins` keeps a trajectory to it; `feedback` and `feedback_rows` are what apps say of trajectories;
`routes` are the paths that there are; `canonical_json`, `json_depth` and `request_digest` compare and bound
bodies; `eviction` chooses what leaves memory first.
"""
