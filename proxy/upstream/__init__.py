"""Choose the vLLM server that answers, and keep the servers loaded with the versions they are to serve.

`load_balancer` picks a `server`; `reconciler` loads and unloads adapters until all servers have what the database says
(read by `replica_store`), and asks each that comes up how it makes a chat of Anthropic messages (`chat_rules_probe`);
`device_pause` waits while the trainer has an accelerator that vLLM shares. `spending` knows whether the day's money for
other servers is spent.
"""
