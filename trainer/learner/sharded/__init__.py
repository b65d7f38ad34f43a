"""Divide the frozen base model among the processes of a step, by FSDP2 of torch (`trainer.sharding = "fsdp"`).

`backend` loads each process's share, `units` says what is gathered together and when, `lockstep` keeps the processes'
forward passes equal in number: a layer is gathered from all of them.
"""
