"""Start a machine when a step is due, and continue the gate's tests meanwhile (`python -m trainer.launcher`).

It stands in the training worker's place. `__main__` sweeps as the worker does; where that would take a step, `launches`
runs the command of the settings, which has `python -m trainer.job` take it elsewhere. `store` records each launch, with
its cost. Nothing here needs torch.
"""
