"""Define the errors that the proxy answers, in OpenAI's shape.

ProxyError
├── BadRequest                 400
│   ├── NotJson                400  the body is not a JSON object
│   ├── BadId                  400  an id has a character that is not allowed
│   ├── NotHttp                400  the data is not an HTTP/1 request
│   └── RefusedField           400  a field that controls the server
├── NoKey                      401  a key is needed and none was sent
│   └── WrongKey               401  the key is wrong, revoked, expired or unknown here
├── Forbidden                  403  a foreign origin or host
│   └── MissingScope           403  the key lacks the scope
├── NotFound                   404
│   └── UnknownModel           404
├── WrongMethod                405  the path exists for other methods
├── TooSlow                    408  the body did not arrive in time
│   └── HeadersTooSlow         408  the headers did not
├── TurnReused                 409  one turn id, two different bodies
├── TooLate                    409  feedback that was used, or never counted, cannot be withdrawn
├── StepRefused                409  a step cannot be requested now
├── VersionRefused             409  a version cannot be moved like this
├── TooLarge                   413
│   ├── UrlTooLong             414
│   └── HeadersTooLarge        431  too many headers, or too many bytes
├── UnsupportedEncoding        415  a body in a content encoding
├── RateLimited                429  the key's requests or tokens of this minute are used up
├── ClientDisconnected         499  the app disconnected before its request was complete; it never sees this
├── UpstreamRefused            502  another server did not accept our key
├── UpstreamDown               503  vLLM does not answer
│   ├── NotReached             503  no connection to vLLM: nothing was sent
│   ├── AdapterLoading         503  no vLLM has the adapter, which is being loaded
│   ├── Training               503  a step uses the accelerator that vLLM shares
│   └── TooManyWaiting         503  too many requests wait until vLLM answers
├── Busy                       503  too many requests, or bytes of their bodies, are in flight
│   └── TooManyConnections     503
├── NotRecorded                503  the journal cannot be written
└── DatabaseAway               503  the request needs the database, which does not answer
"""

from collections.abc import Collection

import msgspec


class ProxyError(Exception):
    """Base of all errors that are answered. `message` states what was wrong and what to do."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None
    closes = False
    """The connection is closed after the error: the rest of the request is not read."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

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
        return headers


class BadRequest(ProxyError):
    status = 400
    kind = "invalid_request_error"


class NotJson(BadRequest):
    code = "invalid_json"


class BadId(BadRequest):
    code = "invalid_id"


class NotHttp(BadRequest):
    code = "invalid_http"
    closes = True


class RefusedField(BadRequest):
    code = "refused_field"


class NoKey(ProxyError):
    status = 401
    kind = "invalid_request_error"
    code = "missing_api_key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class WrongKey(NoKey):
    code = "invalid_api_key"


class Forbidden(ProxyError):
    status = 403
    kind = "invalid_request_error"
    code = "forbidden"


class MissingScope(Forbidden):
    code = "missing_scope"


class NotFound(ProxyError):
    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"


class WrongMethod(ProxyError):
    status = 405
    kind = "invalid_request_error"
    code = "method_not_supported"

    def __init__(self, message: str, allowed: Collection[str]) -> None:
        """`allowed`: the path's methods."""
        super().__init__(message)
        self._allowed = ", ".join(sorted(allowed)).encode()

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", self._allowed)]


class TooSlow(ProxyError):
    status = 408
    kind = "invalid_request_error"
    code = "body_too_slow"
    closes = True


class HeadersTooSlow(TooSlow):
    code = "headers_too_slow"


class TurnReused(ProxyError):
    status = 409
    kind = "invalid_request_error"
    code = "turn_reused"


class TooLate(ProxyError):
    status = 409
    kind = "invalid_request_error"
    code = "too_late"


class StepRefused(ProxyError):
    status = 409
    kind = "invalid_request_error"
    code = "step_refused"


class VersionRefused(ProxyError):
    status = 409
    kind = "invalid_request_error"
    code = "version_refused"


class TooLarge(ProxyError):
    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"
    closes = True


class UrlTooLong(TooLarge):
    status = 414
    code = "url_too_long"


class HeadersTooLarge(TooLarge):
    status = 431
    code = "headers_too_large"


class UnsupportedEncoding(ProxyError):
    status = 415
    kind = "invalid_request_error"
    code = "content_encoding"
    closes = True


class RateLimited(ProxyError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int, limits: list[tuple[bytes, bytes]]) -> None:
        """`limits`: headers that report what is left of each limit."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self._limits = limits

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), *self._limits]


class ClientDisconnected(ProxyError):
    status = 499


class UpstreamRefused(ProxyError):
    status = 502
    code = "upstream_refused"


class UpstreamDown(ProxyError):
    status = 503
    code = "upstream_down"
    retry_after_s = 2


class NotReached(UpstreamDown):
    pass


class AdapterLoading(UpstreamDown):
    code = "adapter_loading"


class Training(UpstreamDown):
    code = "training"


class TooManyWaiting(UpstreamDown):
    code = "too_many_waiting"


class Busy(ProxyError):
    status = 503
    code = "busy"
    retry_after_s = 1
    closes = True


class TooManyConnections(Busy):
    code = "too_many_connections"


class NotRecorded(ProxyError):
    status = 503
    code = "not_recorded"
    retry_after_s = 10


class DatabaseAway(ProxyError):
    status = 503
    code = "database_away"
    retry_after_s = 2
