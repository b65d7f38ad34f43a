"""Run everything on one machine.

`stack` is `whetstone up`: it takes the `data_lock`, starts `vllm_processes` and the programs under a `supervisor`, and
speaks to the proxy by `admin_client`.
"""
