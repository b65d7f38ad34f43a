"""Write trajectories to files.

`exporter` takes `rows` from `store` and writes them by `files`.
"""
