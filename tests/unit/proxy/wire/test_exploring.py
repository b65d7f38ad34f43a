"""A request at temperature 0 becomes one at another temperature, and stays in all else what its app sent."""

import json
from typing import Any

import pytest

from proxy.wire.interfaces import DialectRequest, Server
from proxy.wire.registry import DIALECTS
from proxy.wire.request_body import read_body

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}
UNUSED = {"top_p": 0.9, "top_k": 20}
"""What vLLM ignores at temperature 0, in every dialect."""
CHAT = "/v1/chat/completions"


def request(path: str, *, captured: bool = True, **values: Any) -> DialectRequest:
    body = read_body(json.dumps({"model": "starter"} | BODIES[path] | values).encode())
    return DIALECTS[path](body, Server(captured, 4096))


def upstream(request: DialectRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.to_upstream_body("starter@v3", cache_salt="default"))
    return body


@pytest.mark.parametrize("path", BODIES)
def test_it_is_sampled_at_that_temperature_and_recorded_as_it_came(path: str) -> None:
    one = request(path, temperature=0, **UNUSED)
    before, given = upstream(one), json.loads(one.sampling())
    assert (before["temperature"], one.why_not_trained()) == (0, "greedy")
    assert one.explore(0.7)
    assert one.why_not_trained() is None
    assert upstream(one) == {name: value for name, value in before.items() if name not in UNUSED} | {"temperature": 0.7}
    assert json.loads(one.sampling()) == given
    assert given["temperature"] == 0


@pytest.mark.parametrize("values", [{"min_p": 0.1, "seed": 7}, {"min_p": None, "seed": None}, {"n": 1}, {"n": None}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_vllm_ignores_at_temperature_0_is_left_out(path: str, values: dict[str, Any]) -> None:
    one = request(path, temperature=0.0, **values)
    assert one.explore(1.0)
    assert not {"min_p", "seed"} & upstream(one).keys()


REFUSED = {"n": 2, "top_p": 0, "top_k": -2, "min_p": 1.5, "seed": 2**63}
"""Each of them alone is an error of vLLM's at temperature 0."""


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": None},
        {"temperature": 0.001},
        {"temperature": "0"},
        {"temperature": 0, "min_tokens_": 3},
        {"temperature": 0, "top_p": "0.9"},
        *({"temperature": 0, name: value} for name, value in REFUSED.items()),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_sets_no_temperature_0_or_cannot_be_served_or_trained_on_is_sent_as_it_came(
    path: str, values: dict[str, Any]
) -> None:
    one = request(path, **values)
    before, why = upstream(one), one.why_not_trained()
    assert not one.explore(0.7)
    assert (upstream(one), one.why_not_trained()) == (before, why)


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"use_beam_search": True}),
        (CHAT, {"top_logprobs": 2}),
        ("/v1/messages", {"unknown": 1}),
        ("/v1/responses", {"background": True}),
    ],
)
def test_what_is_not_captured_does_not_explore(path: str, values: dict[str, Any]) -> None:
    one = request(path, temperature=0, **values)
    before = upstream(one)
    assert not one.explore(0.7)
    assert upstream(one) == before


@pytest.mark.parametrize("path", BODIES)
def test_another_servers_request_does_not_explore(path: str) -> None:
    one = request(path, captured=False, temperature=0)
    assert not one.explore(0.7)
    assert upstream(one)["temperature"] == 0
