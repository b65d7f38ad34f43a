"""Settle in short transactions what is due: feedback that waits, trajectories and groups whose time is over.

`sweep` finds it, has it decided and writes it back, `batch_runner` takes it in batches and sets aside what breaks.
"""
