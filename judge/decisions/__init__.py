"""Decide, without I/O: values of `model` in, decisions out.

`apply_feedback` and `effective_feedback` turn feedback into rewards, `reward_parts` adds parts up, `grouping` puts
trajectories into groups, `trajectory_lifecycle` and `group_lifecycle` move their states, `judge_schedule` says when
judges are asked, `numbers` has means and spreads.
"""
