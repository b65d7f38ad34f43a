"""Hold the base model: `shared` keeps one under the LoRAs of all policies, `residence` keeps it in host memory between
steps where vLLM needs the device.
"""
