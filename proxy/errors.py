"""Define the errors that the proxy answers, in OpenAI's shape.

ProxyError
├── BadRequest                 400
│   ├── NotJson                400
│   ├── BadId                  400
│   ├── NotHttp                400
│   └── RefusedField           400
├── NoKey                      401
│   └── WrongKey               401
├── WrongToken                 401
│   └── ExpiredToken           401
├── Forbidden                  403
│   ├── MissingScope           403
│   └── NotForTokens           403
├── NotFound                   404
│   ├── UnknownModel           404
│   └── ResponseNotFound       404
│       └── PreviousNotFound   404
├── WrongMethod                405
├── TooSlow                    408
│   └── HeadersTooSlow         408
├── TurnReused                 409
├── TooLate                    409
├── StepRefused                409
├── VersionRefused             409
├── TooLarge                   413
│   ├── UrlTooLong             414
│   └── HeadersTooLarge        431
├── UnsupportedEncoding        415
├── RateLimited                429
├── SpendingCapReached         429
├── ClientDisconnected         499
├── UpstreamRefused            502
├── UpstreamDown               503
│   ├── NotReached             503
│   ├── AdapterLoading         503
│   ├── Training               503
│   └── TooManyWaiting         503
├── Busy                       503
│   └── TooManyConnections     503
├── NotRecorded                503
└── DatabaseAway               503
"""

from collections.abc import Collection, Sequence

import msgspec

INVALID = "invalid_request_error"


class ProxyError(Exception):
    """Base of all errors that are answered. `message` states what was wrong and what to do.

    A subclass names, as arguments of its class, what differs from its base.
    """

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None
    closes = False
    """The connection is closed after the error: the rest of the request is not read."""

    def __init_subclass__(
        cls,
        status: int | None = None,
        kind: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool | None = None,
    ) -> None:
        values = {"status": status, "kind": kind, "code": code, "retry_after_s": retry_after_s, "closes": closes}
        for name, value in values.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self._headers = headers

    def body(self) -> bytes:
        """Return the error in OpenAI's shape. The `type` beside it is for Anthropic's clients."""
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error, "type": "error"})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the error's response."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.closes:
            headers.append((b"connection", b"close"))
        return [*headers, *self._headers]


class BadRequest(ProxyError, status=400, kind=INVALID):
    """The request is wrong; the message says what."""


class NotJson(BadRequest, code="invalid_json"):
    """The body is not a JSON object."""


class BadId(BadRequest, code="invalid_id"):
    """An id has a character that is not allowed."""


class NotHttp(BadRequest, code="invalid_http", closes=True):
    """The data is not an HTTP/1 request."""


class RefusedField(BadRequest, code="refused_field"):
    """A field controls the server."""


class NoKey(ProxyError, status=401, kind=INVALID, code="missing_api_key"):
    """A key is needed and none was sent."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class WrongKey(NoKey, code="invalid_api_key"):
    """The key is wrong, revoked, expired or unknown here."""


class WrongToken(ProxyError, status=401, kind=INVALID, code="invalid_feedback_token"):
    """What came as a feedback token is none of ours, or its key is revoked."""


class ExpiredToken(WrongToken, code="feedback_token_expired"):
    """The feedback token was valid until recently."""


class Forbidden(ProxyError, status=403, kind=INVALID, code="forbidden"):
    """A foreign origin or host."""


class MissingScope(Forbidden, code="missing_scope"):
    """The key lacks the scope."""


class NotForTokens(Forbidden, code="not_for_feedback_token"):
    """A feedback token does not permit this field, or this completion."""


class NotFound(ProxyError, status=404, kind=INVALID, code="not_found"):
    """There is no such thing, or no such path."""


class UnknownModel(NotFound, code="model_not_found"):
    """No policy or version has that name."""


class ResponseNotFound(NotFound, code="response_not_found"):
    """No stored response has that id, or none that may be read; the message says why."""


class PreviousNotFound(ResponseNotFound, code="previous_response_not_found"):
    """The same of the response that a request continues. The code is the one that OpenAI answers."""


class WrongMethod(ProxyError, status=405, kind=INVALID, code="method_not_supported"):
    """The path exists for other methods."""

    def __init__(self, message: str, allowed: Collection[str]) -> None:
        """`allowed`: the path's methods."""
        super().__init__(message, headers=[(b"allow", ", ".join(sorted(allowed)).encode())])


class TooSlow(ProxyError, status=408, kind=INVALID, code="body_too_slow", closes=True):
    """The body did not arrive in time."""


class HeadersTooSlow(TooSlow, code="headers_too_slow"):
    """The headers did not arrive in time."""


class TurnReused(ProxyError, status=409, kind=INVALID, code="turn_reused"):
    """One turn id, two different bodies."""


class TooLate(ProxyError, status=409, kind=INVALID, code="too_late"):
    """Feedback that was used, or never counted, cannot be withdrawn."""


class StepRefused(ProxyError, status=409, kind=INVALID, code="step_refused"):
    """A step cannot be requested now."""


class VersionRefused(ProxyError, status=409, kind=INVALID, code="version_refused"):
    """A version cannot be moved like this."""


class TooLarge(ProxyError, status=413, kind=INVALID, code="body_too_large", closes=True):
    """The body is over the limit."""


class UrlTooLong(TooLarge, status=414, code="url_too_long"):
    """The URL is over the limit."""


class HeadersTooLarge(TooLarge, status=431, code="headers_too_large"):
    """There are too many headers, or they have too many bytes."""


class UnsupportedEncoding(ProxyError, status=415, kind=INVALID, code="content_encoding", closes=True):
    """The body is in a content encoding."""


class RateLimited(ProxyError, status=429, kind="rate_limit_error", code="rate_limit_exceeded"):
    """The key's requests or tokens of this minute are used up."""

    def __init__(self, message: str, retry_after_s: int, limits: list[tuple[bytes, bytes]]) -> None:
        """`limits`: headers that report what is left of each limit."""
        super().__init__(message, headers=limits)
        self.retry_after_s = retry_after_s


class SpendingCapReached(ProxyError, status=429, kind="insufficient_quota", code="spending_cap_reached"):
    """The day's money is spent, and the server that would answer costs some. The `type` is OpenAI's for a spent budget;
    trying again soon is of no use, and `x-should-retry` says so to the official clients."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, headers=[(b"x-should-retry", b"false")])
        self.retry_after_s = retry_after_s


class ClientDisconnected(ProxyError, status=499):
    """The app disconnected before its request was complete; it never sees this."""


class UpstreamRefused(ProxyError, status=502, code="upstream_refused"):
    """Another server did not accept our key."""


class UpstreamDown(ProxyError, status=503, code="upstream_down", retry_after_s=2):
    """vLLM does not answer."""


class NotReached(UpstreamDown):
    """No connection to vLLM: nothing was sent."""


class AdapterLoading(UpstreamDown, code="adapter_loading"):
    """No vLLM has the adapter, which is being loaded."""


class Training(UpstreamDown, code="training"):
    """A step uses the accelerator that vLLM shares."""


class TooManyWaiting(UpstreamDown, code="too_many_waiting"):
    """Too many requests wait until vLLM answers."""


class Busy(ProxyError, status=503, code="busy", retry_after_s=1, closes=True):
    """Too many requests, or bytes of their bodies, are in flight."""


class TooManyConnections(Busy, code="too_many_connections"):
    """Too many connections are open."""


class NotRecorded(ProxyError, status=503, code="not_recorded", retry_after_s=10):
    """The journal cannot be written."""


class DatabaseAway(ProxyError, status=503, code="database_away", retry_after_s=2):
    """The request needs the database, which does not answer."""
