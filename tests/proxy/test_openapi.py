"""What the proxy says of itself in `/openapi.json`, and what it answers to whatever that allows or forbids."""

from typing import Any

from proxy import passed
from proxy.openapi import BODIES
from proxy.wire import dialects
from tests.proxy.conftest import RunningProxy


def test_every_route_is_told(plain_proxy: RunningProxy) -> None:
    document: dict[str, Any] = plain_proxy.client.get("/openapi.json").json()
    assert BODIES.keys() == dialects.PATHS | passed.PATHS
    assert document["paths"].keys() >= BODIES.keys() | {"/v1/models", "/v1/feedback", "/metrics", "/healthz"}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
