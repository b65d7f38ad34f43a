"""Decide whether a candidate goes live.

`candidate_probe` loads it and asks `probe`; `controller` tests and watches it.
"""
