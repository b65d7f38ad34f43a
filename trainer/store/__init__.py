"""The trainer's SQL; `unit_of_work` joins the others for a step.

Before a step: `eligible_groups` and `examples` say what it may take, `claims` takes it, `members` and `examples` read
the trajectories, `parts` what their rewards were added up from, `turn_scores` what judges gave single answers,
`baselines` what singles are compared with. After it: `step_ends` sets the last states, `gate` writes whether a version
goes live, `gate_tests` the tests before and after that, with `heldout` prompts and live `rewards`. `pause` is for an
accelerator that vLLM shares, `retention` for old adapters, `handover` for policies that take over from a model of
another server.
"""
