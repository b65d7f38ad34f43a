"""What can go wrong at the proxy's door, as OpenAI-shaped errors. Knows no request; opens nothing.

ProxyError
├── BadRequest                 400
│   ├── NotJson                400  the body is no JSON object
│   ├── BadId                  400  an id out of its alphabet
│   └── RefusedField           400  a field that reaches into the server
├── Forbidden                  403  a foreign origin or host
├── NotFound                   404
│   └── UnknownModel           404
├── TooSlow                    408  the body did not come
├── TurnReused                 409  one turn id, two different bodies
├── TooLate                    409  what is to be withdrawn was used, or never counted
├── StepRefused                409  a step that cannot be asked for now
├── TooLarge                   413
├── Gone                       499  the app hung up before it had asked; nobody reads this
├── UpstreamRefused            502  another server did not take our key
├── UpstreamDown               503  vLLM does not answer
├── AdapterLoading             503  vLLM has lost an adapter that is being loaded again
├── NotRecorded                503  the journal cannot be written
└── DatabaseAway               503  what was asked for stands in the database, which does not answer
"""

import msgspec


class ProxyError(Exception):
    """An answer other than what was asked for. `message` says what was wrong and what to do."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after_s: int | None = None
    closes = False
    """The connection ends with it: what is left of the request is not read."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The error in OpenAI's shape; `type` beside it is what Anthropic's clients look for."""
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param}
        return msgspec.json.encode({"error": error, "type": "error"})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the error's response."""
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


class RefusedField(BadRequest):
    code = "refused_field"


class Forbidden(ProxyError):
    status = 403
    kind = "invalid_request_error"
    code = "forbidden"


class NotFound(ProxyError):
    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"


class TooSlow(ProxyError):
    status = 408
    kind = "invalid_request_error"
    code = "body_too_slow"
    closes = True


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


class TooLarge(ProxyError):
    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"
    closes = True


class Gone(ProxyError):
    status = 499


class UpstreamRefused(ProxyError):
    status = 502
    code = "upstream_refused"


class UpstreamDown(ProxyError):
    status = 503
    code = "upstream_down"
    retry_after_s = 2


class AdapterLoading(ProxyError):
    status = 503
    code = "adapter_loading"
    retry_after_s = 2


class NotRecorded(ProxyError):
    status = 503
    code = "not_recorded"
    retry_after_s = 10


class DatabaseAway(ProxyError):
    status = 503
    code = "database_away"
    retry_after_s = 2
