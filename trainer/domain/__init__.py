"""Hold the pure rules of training. No I/O, no torch.

`triggers` says when a step is due and `eligible_groups` what it may take; a `claims` value is what it took.
`advantages` and `baselines` compare a trajectory's reward with that of others; `rows` and `row_builder` make token
rows, `sft_examples` those of supervised steps; `constraints` say what bent the sampling of tokens, and `measured` rows
are without those that it decided. `verdict` compares two versions, `parity` what is served with what was trained;
`figures` and `timing` describe a step, `base` a base model.
"""
