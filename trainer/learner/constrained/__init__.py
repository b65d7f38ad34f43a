"""Weigh tokens whose sampling was constrained, for the policy as it is served (docs/training.md has the proof).

`bending` replays penalties, biases and lists of ids on logits as vLLM applies them, `supports` says which tokens a
truncation leaves. `measuring` computes, before a step, what was allowed at each token and which tokens that decided;
`head` computes the log probabilities of the others during the step.
"""
