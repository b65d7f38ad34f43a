"""Decide whether a new version, the candidate, goes live.

`candidate_probe` loads it into vLLM and has `probe` ask it a few prompts; `answers` holds the answers. Where the
settings want it, `retention` asks it fixed prompts that the base model can answer. `controller` then moves it through
the tests that need traffic, which compare its rewards with those of the live version, and goes on watching it once it
is live. `handover` changes which share of the requests a policy answers in its teacher's place.
"""
