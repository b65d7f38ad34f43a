"""Take a step, from the claim to the promoted version.

`schedule` looks for work, `step` takes one step with what `learners` keeps in memory: `rewarded` makes rows of what it
claimed, `supervised` those of answers to imitate, `hindsight` those of answers that words correct, `distillation` those
of answers that a teacher scores, `preferred` those of pairs of another policy's answers; `replay` adds past attempts to
the first. `dry_run` shows a step without taking it. `metric_sinks` report figures, `failed_rows` keeps what broke.
"""
