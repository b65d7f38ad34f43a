"""What each route needs: the one table of it. Knows paths; no key and no request."""

import re

from proxy import passed
from proxy.wire import dialects
from whetstone.keys import KeyScope

ROUTES: dict[tuple[str, str], KeyScope | None] = {
    **{("POST", path): "inference" for path in sorted(dialects.PATHS | passed.PATHS)},
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
"""Method and path, as FastAPI writes it -> scope; None: everybody may ask, and learns no more than that the proxy
lives. Whatever is not here is for admins."""

CONTENT = frozenset({"comment", "demonstration", "metadata", "end_user", "code_error", "judge_waits"})
"""Fields of feedback, trajectories and groups that may hold words of apps and people, or quote them: only admins read
them."""


def needed(method: str, path: str) -> KeyScope | None:
    """The scope that a request needs; None where everybody may ask."""
    scope = ROUTES.get((method, path))
    if scope is not None or (method, path) in ROUTES:
        return scope
    for known, pattern, scope in _PATTERNS:
        if known == method and pattern.fullmatch(path):
            return scope
    return "admin"


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{[^}]+\})", path)
    return re.compile("".join(_piece(piece) for piece in pieces), re.DOTALL)


def _piece(piece: str) -> str:
    if not piece.startswith("{"):
        return re.escape(piece)
    return ".+" if piece.endswith(":path}") else "[^/]+"


_PATTERNS = tuple((method, _pattern(path), scope) for (method, path), scope in ROUTES.items() if "{" in path)
