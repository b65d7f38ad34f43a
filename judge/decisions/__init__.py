"""Decide, without I/O: values of `model` (feedback, trajectories, groups) in, decisions out.

In this order: `effective_feedback` says which feedback on a target counts, `apply_feedback` what it changes,
`reward_parts` adds the results of reward functions, `trajectory_lifecycle` ends a trajectory, `grouping` gives one
without a group a group, `group_lifecycle` closes and scores groups, `judge_schedule` says when judges rank one first.
`numbers` has means and spreads.
"""
