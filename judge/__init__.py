"""Decide what attempts are worth.

A reward comes in as feedback: `settlement` looks at what is due, reads it by `store`, lets `decisions` decide, and
writes back. `reward_functions` run code on finished trajectories, `ruler` lets a language model rank a group. `audit`
measures judges, `maintenance` keeps tables small. `tasks` is the Celery worker.
"""
