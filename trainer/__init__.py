"""Turn scored groups into a better LoRA.

A step: `step` claims groups by `store`, `domain` makes their trajectories rows with advantages, `learner` takes one
optimizer step, `adapters` writes the files, `vllm` loads them, `gate` probes the candidate, and `store` promotes it.
`tasks` is the Celery worker (`tasks_unsloth` on Unsloth, `team` as several processes); `adopt` and `merge` are
programs that other ones start; `errors` is the tree of what can go wrong.
"""
