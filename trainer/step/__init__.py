"""Take a step, from the claim to the promoted version.

`schedule` looks for work, `step` takes one step: `rewarded` makes rows of what it claimed, `supervised` those of
answers to imitate, `hindsight` those of answers that words correct. `dry_run` shows a step without taking it.
`metric_sinks` report figures, `failed_rows` keeps what broke.
"""
