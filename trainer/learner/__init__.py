"""Train one policy: rows in, one optimizer step, files out. The only folder with torch in it.

`learner` reads like the step it takes. `prefix_trees` and `micro_batches` decide what one forward pass reads, `forward`
runs it (with `attention` and `chunked_head`), `losses` has the formulas; `constrained` weighs tokens whose sampling a
penalty, a truncation or a grammar bent. `backends` loads the model with `hf` or `unsloth`, and `shared_base` keeps it
for all policies; `imported_lora` and `merged` read and write its other forms, `eos_tokens` knows how its answers end.
`self_checks` prove at the start that all this computes what the plain model would; `processes` shares a step.
"""
