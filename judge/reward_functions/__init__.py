"""Run reward functions on finished trajectories.

`runner` takes from `store` what is due and what a function gets of it, and asks the function in a `sandbox`, whose
process is `sandbox_child`.
"""
