"""One policy in training: rows in, one update, files out. The only folder with torch in it.

`learner` reads like the step it takes; `losses` has the formulas, `trees` and `batches` say what one forward pass
reads, `attention` and `head` how, `hf` and `unsloth` load the model, `proofs` show at start that all this computes
what the plain model would. Nothing here knows groups, rewards, tables or vLLM.
"""
