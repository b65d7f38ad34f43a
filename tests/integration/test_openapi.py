"""What the proxy says of itself in `/openapi.json`, and what it answers to whatever that allows or forbids."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error

from proxy.api.openapi import BODIES
from proxy.domain.address import PASSED_THROUGH, RECORDED
from proxy.domain.feedback import Feedback
from tests.unit.proxy.conftest import RunningProxy

EXAMPLES = 8
"""For each operation, as the document says it and against it."""


@pytest.mark.stack
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_the_document_allows_or_forbids_ends_in_5xx(
    real_proxy: RunningProxy, mode: GenerationMode, subtests: pytest.Subtests
) -> None:
    document = schemathesis.openapi.from_url(f"{real_proxy.url}/openapi.json")
    for operation in (result.ok() for result in document.get_all_operations()):
        if mode is GenerationMode.NEGATIVE and "requestBody" not in operation.definition.raw:
            continue  # any path is as the document says

        @given(operation.as_strategy(generation_mode=mode))
        @examples(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        with subtests.test(operation.label):
            ask()


def test_every_field_of_a_feedback_is_documented(plain_proxy: RunningProxy) -> None:
    body = plain_proxy.client.get("/openapi.json").json()["paths"]["/v1/feedback"]["post"]["requestBody"]
    one, batch = body["content"]["application/json"]["schema"]["anyOf"]
    assert batch["items"] == one
    assert one["properties"].keys() == set(Feedback.__struct_fields__)
    assert one["properties"]["judge"]["anyOf"][0]["properties"].keys() == {"kind", "model", "rubric"}


def test_every_route_is_documented(plain_proxy: RunningProxy) -> None:
    document: dict[str, Any] = plain_proxy.client.get("/openapi.json").json()
    assert BODIES.keys() == RECORDED | PASSED_THROUGH
    assert document["paths"].keys() >= BODIES.keys() | {"/v1/models", "/v1/feedback", "/metrics", "/healthz"}
    assert {"post", "get", "delete"} <= set().union(
        *(document["paths"][path].keys() for path in ("/v1/feedback", "/v1/feedback/{feedback_id}"))
    )
    assert document["paths"].keys() >= {"/v1/trajectories/{trajectory_id}/end", "/v1/groups/{group_id}/close"}
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
