"""Run everything on one machine.

`stack` is `whetstone up`: it takes the `data_lock`, and starts `vllm_processes` and the programs under a `supervisor`;
`start_times` has how long vLLM took the last time.
By `admin_client`, the command line finds a stack that runs, and calls its proxy; by `chat_client` it sends chats to it.
"""
