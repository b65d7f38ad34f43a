"""Reads that sample nothing: embeddings, scores, token counts. Passed on unrecorded, but for the model's name."""

from collections.abc import Callable, Mapping

import msgspec

from proxy.asgi import Receive, Scope, Send, body_of, check_json, headers_of, send_whole, unless_disconnected
from proxy.policies import Policies
from proxy.upstream import Answering, Request, refusal
from proxy.wire.body import Body, read_body
from proxy.wire.dialect import raw
from whetstone.ids import new_id
from whetstone.serving import ProxySettings

PATHS = frozenset(
    {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/messages/count_tokens", "/tokenize", "/detokenize"}
)

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Passed:
    """The routes of PATHS."""

    def __init__(
        self,
        policies: Callable[[], Policies],
        upstreams: Mapping[str | None, Answering],
        settings: ProxySettings,
    ) -> None:
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
        data = await body_of(scope, receive, self._settings.max_body_bytes, self._settings.body_timeout_s)
        body = read_body(data, self._settings.media_domains, self._settings.max_choices)
        await unless_disconnected(self._answer(scope["path"], headers, body, send), scope, receive)

    async def _answer(self, path: str, headers: Mapping[bytes, bytes], body: Body, send: Send) -> None:
        speaker, request_id = self._policies().resolve(body.model), new_id()

        def request() -> Request:
            """As it stands now: where it had to wait, another version may be to answer it."""
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
        await send_whole(
            send,
            response.status,
            [(b"content-type", content_type)],
            _renamed(answer, speaker.served_name, body.model),
        )


def _renamed(answer: bytes, served_name: str, model: str) -> bytes:
    """The answer, saying the name the app asked for."""
    try:
        fields = _object.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer
    if "model" in fields:
        return msgspec.json.encode(fields | {"model": raw(model)})
    return answer.replace(served_name.encode(), model.encode()) if "error" in fields else answer
