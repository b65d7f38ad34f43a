"""Read and write HTTP/1.1 on sockets, as a server to apps and as a client to vLLM.

A request's bytes come in at `server_connection`, become a `request_cycle`, and reach the application by `asgi`.
`client` sends requests to vLLM and `client_response` reads the answers. `write_batching` joins small writes.
"""
