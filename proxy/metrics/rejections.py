"""Count the requests that this process has refused, by status and code."""

from collections import Counter

from proxy.errors import ProxyError

refused: Counter[tuple[int, str]] = Counter()
"""Status and code (or type, if it has no code) -> requests."""


def note(error: ProxyError) -> None:
    """Count an error that is answered."""
    refused[error.status, error.code or error.kind] += 1
