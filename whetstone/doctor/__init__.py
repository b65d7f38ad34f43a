"""Say what is wrong: `vllm_checks` of the model server, `log_checks` of what was recorded (read by `log_store`).

`rendering` shows both. `training` says why a policy does not train now, from what `training_store` reads. `memory_plan`
says what a model needs of the GPUs before anything starts.
"""
