"""Turn scored groups into a better LoRA that answers apps.

A step, when a sweep of the `worker` finds one due: `step` claims groups by `store`; `domain` makes their
trajectories rows of tokens with advantages; `learner` takes one optimizer step; `adapters` writes the files; `vllm`
loads them under the new version's name; `gate` probes the candidate and may test it on a share of traffic; `store`
writes in SQL that it is live. The proxies read that a moment later, load it on every server and give it to new
trajectories.

What starts the sweeps: `tasks` under Celery, `tasks_unsloth` with Unsloth, `team` as several processes, `job` on a
machine that the `launcher` has started because a step is due.

`adopt` converts an adapter that is imported, `merge` makes a whole model of one, `convert` makes a base model of a GGUF
file; `errors` is the tree of what can go wrong.
"""
