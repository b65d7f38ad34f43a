"""Hold the base model: `shared` keeps one under the LoRAs of all policies, `residence` keeps it in host memory between
steps where vLLM needs the device, `quantised` has its linear layers in 4 or 8 bits. `model_files` tell how its answers
end.
"""
