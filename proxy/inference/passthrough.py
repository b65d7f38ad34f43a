"""Pass on requests that sample nothing: embeddings, scores, token counts. Unrecorded; only the model's name is
changed."""

from collections.abc import Callable, Mapping

import msgspec

from proxy.domain.policies import Policies
from proxy.errors import INVALID, NotFound, ProxyError
from proxy.http.asgi import Receive, Scope, Send, body_of, check_json, headers_of, send_whole, unless_disconnected
from proxy.upstream.server import Answering, Request, refusal
from proxy.wire.decoding import raw
from proxy.wire.request_body import Body, read_body
from whetstone.config.proxy import ProxySettings
from whetstone.domain.ids import new_id

MAX_DETAIL_BYTES = 500
"""Most bytes of an answer that are quoted, if it is an error that is not in OpenAI's shape."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PassthroughEndpoint:
    """Serves the routes of `routes.PASSED_THROUGH`."""

    def __init__(
        self,
        policies: Callable[[], Policies],
        upstreams: Mapping[str | None, Answering],
        settings: ProxySettings,
        check_spending: Callable[[str], None],
    ) -> None:
        """Create the endpoint. `check_spending`: refuse a policy of another server whose answer would cost too much."""
        self._check_spending = check_spending
        self._policies = policies
        self._upstreams = upstreams
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request.

        Raises:
            ProxyError: before anything was sent; the caller answers it.
        """
        headers = headers_of(scope)
        check_json(headers)
        body = read_body(
            await body_of(scope, receive, self._settings.max_body_bytes, self._settings.body_timeout_s),
            self._settings.media_domains,
            self._settings.max_choices,
        )
        await unless_disconnected(self._answer(scope["path"], headers, body, send), scope, receive)

    async def _answer(self, path: str, headers: Mapping[bytes, bytes], body: Body, send: Send) -> None:
        speaker, request_id = self._policies().resolve(body.model), new_id()
        if speaker.upstream is not None:
            self._check_spending(speaker.policy)

        def request() -> Request:
            """Return the request for the current state: after a wait, another version may have to answer."""
            nonlocal speaker
            speaker = self._policies().resolve(body.model)
            name = speaker.served_name
            return Request(
                path, msgspec.json.encode(body.fields | {"model": raw(name)}), request_id, name, request_id, headers
            )

        with await self._upstreams[speaker.upstream].ask(request) as response:
            answer = await response.read(self._settings.max_answer_bytes)
            if response.status != 200 and (error := refusal(response, answer, speaker)):
                raise error
        content_type = response.headers.get(b"content-type", b"application/json")
        if response.status >= 400 and "error" not in _fields_of(answer):
            answer, content_type = _error(response.status, answer, path, body.model), b"application/json"
        await send_whole(
            send,
            response.status,
            [(b"content-type", content_type)],
            _renamed(answer, speaker.served_name, body.model),
        )


def _fields_of(answer: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of an answer; none if it is not a JSON object. An error in OpenAI's or Anthropic's shape has
    the field `error`."""
    try:
        return _object.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _error(status: int, answer: bytes, path: str, model: str) -> bytes:
    """Build an error in OpenAI's shape from an answer that has none: vLLM (0.32) has no route for what its model cannot
    do, and answers `{"detail": "Not Found"}`."""
    detail = answer[:MAX_DETAIL_BYTES].decode("utf-8", "replace")
    if status in (404, 405):
        return NotFound(f"the model {model!r} does not take {path}: the model server answers {detail}").body()
    error = ProxyError(f"the model server answers {path} with {status}: {detail}")
    error.kind = INVALID if status < 500 else error.kind
    return error.body()


def _renamed(answer: bytes, served_name: str, model: str) -> bytes:
    """Return the answer with the model name that the app requested."""
    fields = _fields_of(answer)
    if "model" in fields:
        return msgspec.json.encode(fields | {"model": raw(model)})
    return answer.replace(served_name.encode(), model.encode()) if "error" in fields else answer
