"""Run reward functions on finished trajectories.

`runner` takes what is due from `store`, makes it a `payload`, and asks the function in a `sandbox`, whose process is
`sandbox_child`.
"""
