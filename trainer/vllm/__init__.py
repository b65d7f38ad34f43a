"""Speak to the vLLM servers during a step; at all other times the proxies load and unload.

`pool` knows them, `retry` waits for them, `device_pause` shares their accelerator. `teacher` is a server of another
model.
"""
