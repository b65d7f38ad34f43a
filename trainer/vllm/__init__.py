"""Speak to the vLLM servers during a step.

`pool` knows them, `retry` waits for them, `device_pause` shares their accelerator.
"""
