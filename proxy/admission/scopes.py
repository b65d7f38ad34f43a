"""Define which scope each route needs, and suggest a route for a wrong path."""

import re

from proxy.domain.routes import PASSED_THROUGH, RECORDED
from whetstone.domain.api_keys import KeyScope

ROUTES: dict[tuple[str, str], KeyScope | None] = {
    **{("POST", path): "inference" for path in sorted(RECORDED | PASSED_THROUGH)},
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{name:path}"): "inference",
    ("POST", "/v1/feedback"): "feedback",
    ("GET", "/v1/feedback/{feedback_id}"): "feedback",
    ("DELETE", "/v1/feedback/{feedback_id}"): "feedback",
    ("GET", "/v1/trajectories/{trajectory_id}"): "feedback",
    ("POST", "/v1/trajectories/{trajectory_id}/end"): "feedback",
    ("GET", "/v1/groups/{group_id}"): "feedback",
    ("POST", "/v1/groups/{group_id}/close"): "feedback",
    ("GET", "/health"): None,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
}
"""Method and path, as FastAPI writes it -> scope. None: public; the answer shows only that the proxy is running. A
route that is not listed is for admins."""

CONTENT = frozenset({"comment", "demonstration", "metadata", "end_user", "code_error", "judge_waits"})
"""Fields of feedback, trajectories and groups that may contain or quote text of apps and people. Only admins may read
them."""


def needed(method: str, path: str) -> KeyScope | None:
    """Return the scope that a request needs, or None if the route is public.

    If there is no such route, return the scope of the route that was probably meant. So a key that may use that route
    gets the real error, and not one about the key.
    """
    scope = ROUTES.get((method, path))
    if scope is not None or (method, path) in ROUTES:
        return scope
    for known, pattern, scope in _PATTERNS:
        if known == method and pattern.fullmatch(path):
            return scope
    for meant in (path, *_almost(path)):
        for scope in methods(meant).values():
            return scope
    return "admin"


def methods(path: str) -> dict[str, KeyScope | None]:
    """Return the methods of this path in ROUTES, each with its scope."""
    exact = {method: scope for (method, known), scope in ROUTES.items() if known == path}
    return exact or {method: scope for method, pattern, scope in _PATTERNS if pattern.fullmatch(path)}


def hint(path: str) -> str:
    """Return what to do about a wrong path, if that is clear: the rest of a sentence, or ""."""
    with_v1, *without_v1 = _almost(path)
    if methods(with_v1):
        return "; did you leave /v1 out of the base URL?"
    if any(methods(one) for one in without_v1):
        return "; is there one /v1 too many in the base URL?"
    return ""


def _almost(path: str) -> list[str]:
    """Return the path with one more /v1, and with one less if it has one."""
    return ["/v1" + path, *([path.removeprefix("/v1")] if path.startswith("/v1/") else [])]


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{[^}]+\})", path)
    return re.compile("".join(_piece(piece) for piece in pieces), re.DOTALL)


def _piece(piece: str) -> str:
    if not piece.startswith("{"):
        return re.escape(piece)
    return ".+" if piece.endswith(":path}") else "[^/]+"


_PATTERNS = tuple((method, _pattern(path), scope) for (method, path), scope in ROUTES.items() if "{" in path)
