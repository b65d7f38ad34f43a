"""What each route needs: the one table of it, and what somebody may have meant who asks for no route."""

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
    """The scope that a request needs; None where everybody may ask.

    Where there is no such route, what the route needs that was probably meant: who may use that one is answered what
    is wrong, not that the key is.
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
    """The methods of this path in ROUTES, each with what it needs."""
    exact = {method: scope for (method, known), scope in ROUTES.items() if known == path}
    return exact or {method: scope for method, pattern, scope in _PATTERNS if pattern.fullmatch(path)}


def hint(path: str) -> str:
    """What to do about a path that is none, where it is clear: more of a sentence, or nothing."""
    with_v1, *without_v1 = _almost(path)
    if methods(with_v1):
        return "; did you leave /v1 out of the base URL?"
    if any(methods(one) for one in without_v1):
        return "; is there one /v1 too many in the base URL?"
    return ""


def _almost(path: str) -> list[str]:
    """The path with a /v1 more, and with one less if it has one."""
    return ["/v1" + path, *([path.removeprefix("/v1")] if path.startswith("/v1/") else [])]


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{[^}]+\})", path)
    return re.compile("".join(_piece(piece) for piece in pieces), re.DOTALL)


def _piece(piece: str) -> str:
    if not piece.startswith("{"):
        return re.escape(piece)
    return ".+" if piece.endswith(":path}") else "[^/]+"


_PATTERNS = tuple((method, _pattern(path), scope) for (method, path), scope in ROUTES.items() if "{" in path)
