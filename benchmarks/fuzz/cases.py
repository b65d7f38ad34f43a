"""The cases of `fuzz`: right and wrong requests by hypothesis, over every route."""

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from proxy.domain.address import PASSED_THROUGH, RECORDED
from proxy.wire.request_body import REFUSED
from tests.unit.proxy.generated import CHAT_FEATURES, TEXT_FEATURES, chats, completions

ODD_TEXTS = (
    "", " ", "\x00", "\n", "a\r\nb: c", "é", "\ud800", "\ufeff", "😀", "..", "../../etc", "%00", "%2f", "'; --", "{}",
    "null", "NaN", "1e999", "starter", "starter@v0", "starter@v9", "@v0", "x" * 129, "x" * 5000, "\\u0000", "wsk_a_b",
)  # fmt: skip
ODD_NUMBERS = (0, -1, 1, 2, 257, 2**31, 2**63, 2**64, 10**30, -0.0, 0.5, 1e-320, 1e308, 1e999, -1e999, float("nan"))
IDS = ("t1", "t2", "g1", "g2", "a:b@c-d.e_f", "0" * 128)
HEADERS = (
    "X-Trajectory-Id", "X-Group-Id", "X-Group-Size", "X-Task", "X-Split", "X-No-Train", "X-Turn-Id", "X-Metadata",
    "Idempotency-Key", "X-Stainless-Retry-Count", "X-Session-Id", "X-Request-Id", "Traceparent", "Authorization",
    "X-Api-Key", "Anthropic-Version", "Content-Type", "Content-Encoding", "Accept-Encoding", "Origin", "Host", "Expect",
    "X-Forwarded-For", "Cookie", "Upgrade", "Connection", "Range", "If-None-Match", "Transfer-Encoding",
)  # fmt: skip
METHODS = ("GET", "POST", "POST", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
ADDRESSES = ("trajectory", "group", "group-size", "task", "split", "no-train", "turn", "nonsense", "")
ROUTES = (
    *sorted(RECORDED | PASSED_THROUGH),
    "/v1/models", "/v1/models/{}", "/v1/feedback", "/v1/feedback/{}", "/v1/trajectories/{}", "/v1/trajectories/{}/end",
    "/v1/groups/{}", "/v1/groups/{}/close", "/v1/reviews", "/admin/policies", "/admin/policies/{}/versions",
    "/admin/policies/{}/decisions", "/admin/policies/{}/promote", "/admin/policies/{}/rollback",
    "/admin/policies/{}/pin", "/admin/policies/{}/steps", "/admin/keys", "/admin/keys/{}", "/healthz", "/readyz",
    "/metrics", "/openapi.json", "/ui", "/", "/sleep", "/v1/load_lora_adapter", "/{}",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One request, in pieces that can be sent as they are."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def wire(self) -> bytes:
        """Return it as bytes, with its length and `connection: close`."""
        framing = [(b"content-length", b"%d" % len(self.body)), (b"connection", b"close")]
        lines = [b"%s: %s" % header for header in (*self.headers, *framing)]
        return b"\r\n".join([b"%s %s HTTP/1.1" % (self.method.encode(), self.target), *lines, b"", self.body])


texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=8)
numbers = st.sampled_from(ODD_NUMBERS) | st.integers() | st.floats()
values: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
ids = st.sampled_from(IDS) | texts

_chats = st.tuples(st.sampled_from(sorted(CHAT_FEATURES)), st.booleans()).flatmap(lambda chosen: chats(*chosen))
_texts = st.tuples(st.sampled_from(sorted(TEXT_FEATURES)), st.booleans()).flatmap(lambda chosen: completions(*chosen))
_messages = st.fixed_dictionaries(
    {"model": st.just("starter"), "max_tokens": st.integers(1, 9)}, optional={"stream": st.booleans(), "system": texts}
).flatmap(lambda body: st.just(body | {"messages": [{"role": "user", "content": "hi"}]}))
_responses = st.fixed_dictionaries(
    {"model": st.just("starter"), "input": texts | st.just([{"role": "user", "content": "hi"}])},
    optional={"stream": st.booleans(), "store": st.booleans(), "instructions": texts, "previous_response_id": ids},
)
_passed = st.fixed_dictionaries(
    {"model": st.just("starter")},
    optional={"input": values, "prompt": texts, "tokens": values, "text_1": values, "text_2": values, "query": values},
)
_feedback = st.fixed_dictionaries(
    {},
    optional={
        "trajectory_id": ids, "completion_id": ids, "group_id": ids, "reward": numbers, "thumbs": st.just("up") | texts,
        "rewards": st.dictionaries(ids, numbers, max_size=3), "parts": st.dictionaries(texts, numbers, max_size=3),
        "judge": st.just({"kind": "ruler"}) | values, "demonstration": texts | values, "comment": texts,
        "metadata": st.dictionaries(texts, values, max_size=2), "idempotency_key": texts, "final": st.booleans(),
        "choice": st.integers(-1, 3),
    },
)  # fmt: skip
_rewards = st.fixed_dictionaries({"trajectory_id": st.sampled_from(IDS), "reward": st.floats(-1, 1)})
_admin = st.fixed_dictionaries(
    {}, optional={"version": numbers, "name": texts, "scopes": values, "force": st.booleans(), "reason": texts}
)


@st.composite
def mutated(draw: st.DrawFn, bodies: SearchStrategy[Any]) -> bytes:
    """Return a body as bytes: right, with odd values in it, or damaged."""
    body = draw(bodies)
    for _ in range(draw(st.integers(0, 2))):
        body = draw(_with_an_odd_value(body))
    data = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return draw(damaged(data)) if draw(st.integers(0, 5)) == 0 else data


@st.composite
def _with_an_odd_value(draw: st.DrawFn, body: Any) -> Any:
    if not isinstance(body, dict):
        return draw(values)
    names = st.sampled_from(sorted(body)) if body else texts
    name = draw(names | st.sampled_from(sorted(REFUSED)) | st.sampled_from(("metadata", "user", "n", "stop", "tools")))
    if isinstance(body.get(name), list) and body[name] and draw(st.booleans()):
        place = draw(st.integers(0, len(body[name]) - 1))
        odd = draw(_with_an_odd_value(body[name][place]))
        return body | {name: [*body[name][:place], odd, *body[name][place + 1 :]]}
    return body | {name: draw(values | values.map(lambda value: [value]))}


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes cut off, doubled, or changed somewhere."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 40)))
    put = draw(st.binary(max_size=6) | st.just(data[start:stop] * 2) | st.sampled_from((b"[" * 300, b"\r\n", b"\x00")))
    return data[:start] + put + draw(st.sampled_from((data[stop:], b"")))


@st.composite
def _targets(draw: st.DrawFn) -> bytes:
    path = draw(st.sampled_from(ROUTES)).replace("{}", draw(ids | st.just("starter")))
    if draw(st.integers(0, 6)) == 0:
        address = draw(st.lists(st.tuples(st.sampled_from(ADDRESSES), ids), max_size=3))
        path = "/r/" + "".join(f"{name}/{value}/" for name, value in address) + path.lstrip("/")
    query = "?" + draw(texts) if draw(st.integers(0, 6)) == 0 else ""
    escape = draw(st.sampled_from(("", "/", "/%")))
    return "".join(one if one.isascii() and (one.isalnum() or one in "/-._~?:@" + escape) else _escaped(one)
                   for one in path + query).encode()  # fmt: skip


def _escaped(one: str) -> str:
    return "".join(f"%{byte:02X}" for byte in one.encode("utf-8", "surrogatepass"))


_values_of_headers = (
    st.sampled_from(IDS)
    | texts.map(lambda text: text.encode("utf-8", "surrogatepass").decode("latin-1"))
    | values.map(json.dumps)
    | st.sampled_from(("application/json", "text/plain", "gzip", "true", "eval", "2", "1", "http://localhost", "close"))
)


@st.composite
def _headers(draw: st.DrawFn) -> tuple[tuple[bytes, bytes], ...]:
    odd = draw(st.just([]) | st.lists(st.tuples(st.sampled_from(HEADERS), _values_of_headers), max_size=3))
    usual = [("Host", "localhost"), ("Content-Type", "application/json")]
    sent = [one for one in usual if draw(st.integers(0, 20))] + odd
    one_line = str.maketrans("", "", "\r\n")
    return tuple((name.encode(), value.translate(one_line).encode("latin-1", "replace")) for name, value in sent)


_BODIES = {
    "/v1/chat/completions": _chats, "/v1/completions": _texts, "/v1/messages": _messages, "/v1/responses": _responses,
    "/v1/feedback": _feedback | _rewards | st.lists(_feedback | _rewards, max_size=3),
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Return a request that is HTTP, with any content."""
    if draw(st.integers(0, 3)):
        path = draw(st.sampled_from(sorted(_BODIES)))
        return Request("POST", path.encode(), draw(_headers()), draw(mutated(_BODIES[path])))
    body = draw(st.just(b"") | mutated(_passed | _admin | _feedback | values))
    return Request(draw(st.sampled_from(METHODS)), draw(_targets()), draw(_headers()), body)


_RIGHT = Request(
    "POST", b"/v1/chat/completions", ((b"host", b"localhost"), (b"content-type", b"application/json")),
    b'{"model":"starter","messages":[{"role":"user","content":"hi"}]}',
).wire()  # fmt: skip
_CHUNKED = (
    b"POST /v1/feedback HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    b'7\r\n{"trajec\r\n10;x=y\r\ntory_id":"t1","\r\n9\r\nreward":1\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n'
)
_PIECES = (
    b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", _RIGHT, _CHUNKED, b"GET / HTTP/1.0\r\n\r\n", b"\r\n", b"\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET http://localhost/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
)  # fmt: skip
streams = (
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=3).map(b"".join).flatmap(damaged)
    | requests().map(Request.wire).flatmap(damaged)
    | st.binary(max_size=60)
)
"""Bytes that are HTTP, damaged HTTP, or random."""
