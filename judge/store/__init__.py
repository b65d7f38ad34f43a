"""The judge's SQL: `unit_of_work` reads what is due and writes decisions.

`groups` is for trajectories that have no group yet, `ruler` for the groups that language models rank.
"""
