"""Decide, without I/O: values of `model` (feedback, trajectories, groups) in, decisions out.

In this order: `feedback` says which feedback on a target counts and what it changes, `reward_parts` adds the results of
reward functions, `grouping` gives a trajectory without a group one, and `lifecycle` ends trajectories, and closes and
scores groups, after judges have ranked them where they have to.
"""
