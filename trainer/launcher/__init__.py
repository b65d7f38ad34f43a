"""The launcher (`python -m trainer.launcher`): the training worker's place where steps are computed by launched jobs.

Each sweep continues candidates that are in tests, as the worker does, and asks `due` whether any policy has a step to
take. If so, `launches` runs the command of the settings, which has `python -m trainer.job` take the steps elsewhere;
`store` records the launch, with its cost. Nothing here needs torch.
"""
