"""Define the keys of a request's ASGI scope for what the proxy knows about the request."""

from collections.abc import Mapping
from typing import Any

from whetstone.domain.api_keys import Principal

PRINCIPAL = "whetstone.principal"
"""Holds the `Principal` whose API key the request came with, or None."""
URL_ADDRESS = "whetstone.url_address"
"""Holds what the request's URL states about the call."""


def key_of(scope: Mapping[str, Any]) -> str | None:
    """Return the id of the key that a request came with; None where it needed none."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return None if principal is None else principal.key_id


def is_admin(scope: Mapping[str, Any]) -> bool:
    """Return whether a request may read everything in its project."""
    principal: Principal | None = scope.get(PRINCIPAL)
    return principal is not None and principal.allows("admin")
