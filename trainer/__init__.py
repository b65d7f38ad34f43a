"""Turn scored groups into a better LoRA that answers apps.

A step, when `tasks` (the Celery worker) finds one due: `step` claims groups by `store`; `domain` makes their
trajectories rows of tokens with advantages; `learner` takes one optimizer step; `adapters` writes the files; `vllm`
loads them under the new version's name; `gate` probes the candidate and may test it on a share of traffic; `store`
writes in SQL that it is live. The proxies read that a moment later, load it on every server and give it to new
trajectories.

`tasks_unsloth` and `team` are the worker on Unsloth and as several processes; `adopt` converts an adapter that is
imported, `merge` makes a whole model of one, `convert` makes a base model of a GGUF file;
`errors` is the tree of what can go wrong.
"""
