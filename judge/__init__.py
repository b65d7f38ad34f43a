"""Decide what trajectories are worth: turn feedback into rewards and scored groups.

The proxy has written feedback to SQL. `tasks`, the Celery worker, wakes every second and at a hint from the proxy;
`settlement` reads by `store` what is due, `decisions` decides, and `settlement` writes back: the trajectory's reward,
its group, and the group's state. Where the project asks for it, `reward_functions` run code on finished trajectories
and `ruler` (RULER) lets a language model rank a group; their results are parts of the same rewards. A group is scored
once all its trajectories are over and have their rewards: from then on the program `trainer` may claim it.

`audit` measures language models as judges, `maintenance` keeps tables small. `errors` is the tree of what can fail.
"""
