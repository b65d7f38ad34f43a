"""What it is worth: applies feedback, ends trajectories, closes and scores groups. No torch, no web framework.

`facts` are its values; `settle`, `trajectories` and `assemble` decide; `store` asks and writes; `sweep` joins the two
into short transactions; `tasks` is what Celery runs.
"""
