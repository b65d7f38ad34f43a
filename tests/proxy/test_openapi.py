"""What the proxy says of itself in `/openapi.json`, and what it answers to whatever that allows or forbids."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import settings as examples
from schemathesis.checks import not_a_server_error

from proxy import passed
from proxy.openapi import BODIES
from proxy.wire import dialects
from tests.proxy.conftest import RunningProxy

EXAMPLES = 60
"""For each operation: half of them as the document says, half against it."""


@pytest.fixture
def document(real_proxy: RunningProxy) -> Any:
    """Of a proxy in front of the real vLLM."""
    return schemathesis.openapi.from_url(f"{real_proxy.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("document")


@pytest.mark.stack
@schema.parametrize()
@examples(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_nothing_the_document_allows_or_forbids_ends_in_5xx(case: Any) -> None:
    case.call_and_validate(checks=[not_a_server_error], timeout=60)


def test_every_route_is_told(plain_proxy: RunningProxy) -> None:
    told: dict[str, Any] = plain_proxy.client.get("/openapi.json").json()
    assert BODIES.keys() == dialects.PATHS | passed.PATHS
    assert told["paths"].keys() >= BODIES.keys() | {"/v1/models", "/v1/feedback", "/metrics", "/healthz"}
    for operations in told["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
