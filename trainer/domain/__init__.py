"""Hold the pure rules of training. No I/O, no torch.

`triggers` says when a step is due and `candidates` what it may take; a `claims` row is what it took. `advantages` and
`baselines` say what a trajectory was worth; `rows` and `row_builder` make token rows, `sft_examples` those of
supervised steps. `verdict` compares two versions, `figures` and `timing` describe a step, `base` a base model.
"""
