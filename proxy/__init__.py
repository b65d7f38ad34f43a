"""What is said: OpenAI's wire in front of vLLM, every completion recorded, feedback taken. No torch, no litellm.

A request's way: `guard` -> `inference` -> `request` (what was asked) and `address` (whose call) -> `policies` (which
version speaks) -> `upstream` (vLLM) -> `answer` or `events` (capture, strip) -> `recorder` (journal, then SQL by
`store`) -> last byte out.
"""
