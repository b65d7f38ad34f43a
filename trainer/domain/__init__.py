"""Hold the pure rules of training. No I/O, no torch.

`triggers` says when a step is due and `eligible_groups` what it may take; a `claims` value is what it took.
Of its trajectories, `usable_members` can be trained on. `advantages` and `baselines` compare a trajectory's reward with
that of others; `rows` and `row_builder` make token rows, `preference_rows` those of steps that tell good from bad,
`examples` are for steps without rewards; `constraints` say what bent the sampling of tokens, and `measured` rows are
without those that it decided. `gate` holds the arithmetic of its tests; `figures` and `timing` describe a step, `base`
a base model.
"""
