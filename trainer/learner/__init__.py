"""Train one policy: rows in, a step's updates, files out. The only folder with torch in it.

`learner` reads like the step it takes. `prefix_trees` and `micro_batches` decide what one forward pass reads, `forward`
runs it (with `attention` and `chunked_head`), `losses` has the formulas, `gradient` adds them up in as much memory as
there is, `updates` divides a step into updates with a learning rate each; `constrained` weighs tokens whose sampling a
penalty, a truncation or a grammar bent. `backends` loads the model with `hf` or `unsloth`, `base` holds it for all
policies; `imported_lora` and `merged` read and write its other forms, `gguf` makes a base model of a GGUF file.
`self_checks` prove at the start that all this computes what the plain model would; `processes` shares a step, `sharded`
the base model too. `engine` is what a step needs of all this, and `service` the other engine: a training service.
"""
