"""Plan the memory of the devices: what vLLM and the trainer need for a model, and what fits.

`model_files` reads the sizes of a model from its config.json and the headers of its safetensors. From them, `training`
computes the bytes of a step and `serving` those of a vLLM. `devices` finds the GPUs and places the processes on them.
`plan` puts it together: utilisation, longest row, tokens of KV cache, and whether all of it fits; `automatic` writes
it into the settings. `learning_rate` chooses AdamW's by the model's size.
"""
