"""Measure judges: `python -m judge.audit`, which `whetstone judge` starts.

`calibrate` compares them with `references`, by `agreement`; `hacking_signs` looks at what happened over time. `report`
shows it, `store` reads it.
"""
