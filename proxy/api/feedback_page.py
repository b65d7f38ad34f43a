"""Serve what an app's web pages need to send feedback: tokens, for the app's server, and the script `feedback.js`."""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.api import openapi
from proxy.api.bodies import as_json, parse_body
from proxy.domain.feedback import check_id
from proxy.http.asgi import key_of, read_whole
from whetstone.config.proxy import ProxySettings

SCRIPT = Path(__file__).with_name("feedback.js")
SCRIPT_HEADERS = {
    "cache-control": "public, max-age=3600",
    "x-content-type-options": "nosniff",
    # A page may forbid itself what other origins have not released for it.
    "cross-origin-resource-policy": "cross-origin",
}
MAX_LIFETIME_S = 30 * 24 * 3600


class TokenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The completion that a web page may rate."""

    completion_id: Annotated[
        str, Meta(description="`X-Completion-Id`, the answer's own id, or the id of a tool call or a Responses item.")
    ]
    choice: Annotated[int, Meta(description="Which choice of the answer, from 0.", ge=0, lt=2**31)] = 0
    expires_in_s: (
        Annotated[
            int,
            Meta(description="Valid for; left out: `proxy.feedback_token_lifetime_s`.", ge=1, le=MAX_LIFETIME_S),
        ]
        | None
    ) = None


def add(api: FastAPI, *, project: str, tokens: FeedbackTokens, settings: ProxySettings) -> None:
    """Add the routes."""

    @api.post("/v1/feedback/tokens", status_code=201, openapi_extra=openapi.json_body_of(TokenRequest))
    async def make_token(request: Request) -> Response:
        """Make a token with which a web page may send a thumb and a comment on one completion, and nothing else. It is
        valid until it expires or the key of this request ends. As with feedback, the completion may still come."""
        body = await read_whole(request.receive, settings.max_body_bytes, settings.body_timeout_s)
        wanted = parse_body(body, TokenRequest)
        check_id("completion_id", wanted.completion_id)
        expires_at_s = tokens.expiry(wanted.expires_in_s)
        token = tokens.sign(project, key_of(request.scope), wanted.completion_id, wanted.choice, expires_at_s)
        answer = {"object": "feedback.token", "token": token, "expires_at": expires_at_s}
        return as_json(answer | {"completion_id": wanted.completion_id, "choice": wanted.choice}, status=201)

    @api.get("/feedback.js", include_in_schema=False)
    async def feedback_script() -> Response:
        """Serve the script that puts thumbs under an answer."""
        return Response(_script(), media_type="text/javascript", headers=SCRIPT_HEADERS)


@cache
def _script() -> bytes:
    return SCRIPT.read_bytes()
