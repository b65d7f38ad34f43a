"""What it is worth: applies feedback, ends trajectories, closes and scores groups. No torch, no web framework.

`assemble` decides, `store` asks and writes, `sweep` joins the two into short transactions, `tasks` is what Celery runs.
"""
