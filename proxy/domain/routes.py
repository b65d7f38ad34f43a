"""List the paths that the proxy serves, by what serves them."""

RECORDED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""Paths whose calls sample, and are recorded."""
PASSED_THROUGH = frozenset(
    {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
)
"""Paths that vLLM answers without sampling: not recorded."""
HEALTH = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths about the whole proxy, of no project."""
DASHBOARD = "/ui"


def is_dashboard(path: str) -> bool:
    """Return whether a request is for the dashboard."""
    return path.startswith(DASHBOARD) and (path == DASHBOARD or path[len(DASHBOARD)] == "/")
