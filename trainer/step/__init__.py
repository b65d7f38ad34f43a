"""Take a step, from the claim to the promoted version.

`schedule` looks for work, `step` takes one step of reinforcement learning, `supervised` reads what a supervised step
learns from, `dry_run` shows a step without taking it. `metric_sinks` report figures, `failed_rows` keeps what broke.
"""
