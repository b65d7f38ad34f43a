"""Settle in short transactions what is due: feedback that waits, trajectories and groups whose time is over.

`sweep` finds it and has it decided, `batch_runner` takes it in batches and sets aside what breaks, `write_back` writes
changed trajectories and marks their groups as due.
"""
