"""Measure judges: `python -m judge.audit`, which `whetstone judge` starts.

`calibrate` compares them with `references`, by `agreement`; `hacking_signs` looks at what happened over time. `report`
and `plots` show it, `store` reads it.
"""
