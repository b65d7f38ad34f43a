"""Have a training service compute the steps: rows go to a server of the Tinker API, adapters come back.

`learner` is the learner of a policy whose weights and optimizer are there, `data` turns rows and losses into what the
API takes, and its answers into figures, `api` sends requests and waits for their results.
"""
