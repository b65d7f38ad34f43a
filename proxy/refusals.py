"""What this process has refused, by status and code. Counts; answers nobody."""

from collections import Counter

from proxy.errors import ProxyError

refused: Counter[tuple[int, str]] = Counter()
"""Status and code (or type, where it has none) -> requests."""


def note(error: ProxyError) -> None:
    """Count an error that somebody is answered."""
    refused[error.status, error.code or error.kind] += 1
