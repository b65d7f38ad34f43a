"""What it is worth: applies feedback, ends trajectories, closes and scores groups. No torch, no web framework.

`facts` are its values; `settle`, `place`, `trajectories` and `assemble` decide; `store` asks and writes; `sweep` joins
the two into short transactions; `code` runs reward functions (in a `sandbox`, whose process is `child`) and
`parts` adds up what they say; `tasks` is what Celery runs.
"""
