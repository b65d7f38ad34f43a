"""Every route and what it needs. A new route, and a new text in what is answered, fails here until it is decided on."""

import pytest
from sqlalchemy import JSON, Table, Text

from migrations import schema
from proxy.admission.api_keys import CONTENT, ROUTES, scope_needed
from tests.unit.proxy.conftest import RunningProxy
from whetstone.domain.api_keys import SCOPES, SUFFICIENT, KeyScope, Need, Principal

EXPECTED: dict[tuple[str, str], Need | None] = {
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/v1/messages"): "inference",
    ("POST", "/v1/responses"): "inference",
    ("GET", "/v1/responses/{response_id}"): "inference",
    ("DELETE", "/v1/responses/{response_id}"): "inference",
    ("GET", "/v1/responses/{response_id}/input_items"): "inference",
    ("POST", "/v1/responses/{response_id}/cancel"): "inference",
    ("POST", "/v1/embeddings"): "inference",
    ("POST", "/v1/score"): "inference",
    ("POST", "/v1/rerank"): "inference",
    ("POST", "/v1/messages/count_tokens"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{name}"): "inference",
    ("POST", "/v1/feedback"): "feedback",
    ("POST", "/v1/feedback/tokens"): "inference or feedback",
    ("GET", "/v1/feedback/{feedback_id}"): "feedback",
    ("DELETE", "/v1/feedback/{feedback_id}"): "feedback",
    ("GET", "/v1/trajectories/{trajectory_id}"): "feedback",
    ("POST", "/v1/trajectories/{trajectory_id}/end"): "feedback",
    ("GET", "/v1/groups/{group_id}"): "feedback",
    ("POST", "/v1/groups/{group_id}/close"): "feedback",
    ("GET", "/v1/reviews"): "admin",
    ("GET", "/metrics"): "admin",
    ("GET", "/admin/keys"): "admin",
    ("POST", "/admin/keys"): "admin",
    ("DELETE", "/admin/keys/{key_id}"): "admin",
    ("DELETE", "/admin/trajectories/{trajectory_id}"): "admin",
    ("DELETE", "/admin/users/{user}"): "admin",
    ("GET", "/admin/policies"): "admin",
    ("GET", "/admin/policies/{policy}/versions"): "admin",
    ("GET", "/admin/policies/{policy}/decisions"): "admin",
    ("POST", "/admin/policies/{policy}/promote"): "admin",
    ("POST", "/admin/policies/{policy}/rollback"): "admin",
    ("POST", "/admin/policies/{policy}/pin"): "admin",
    ("POST", "/admin/policies/{policy}/step"): "admin",
    ("POST", "/admin/policies/{policy}/state"): "admin",
    ("GET", "/health"): None,
    ("GET", "/healthz"): None,
    ("GET", "/readyz"): None,
}
"""Method and path, as /openapi.json writes it -> the scope it needs."""

PLAIN = frozenset(
    {
        *("id", "group_id", "trajectory_id", "completion_id", "tail_completion_id", "left_group_id", "continues"),
        *("policy", "task", "split", "state", "formed_by", "compared_with", "prompt_hash", "target_kind", "target_id"),
        *("why_not_trained", "reason", "source", "reward_source", "rewards", "parts", "code_parts", "judge"),
        *("idempotency_key", "credit"),
    }
)
"""Texts and JSON that whoever gives feedback may read: ids, labels, numbers, and what it said of rewards itself."""
HIDDEN = frozenset({"project", "key_id"})
"""Told to nobody."""


def sample(path: str) -> str:
    """The path with something in its holes."""
    return path.replace("{", "").replace("}", "")


def test_every_route_of_the_proxy_is_in_the_table_and_no_other(door: RunningProxy) -> None:
    paths = door.client.get("/openapi.json").json()["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == EXPECTED.keys()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("route", "needs"), EXPECTED.items(), ids=lambda value: value and " ".join(value))
def test_a_key_opens_what_its_scope_is_for(route: tuple[str, str], needs: Need | None, scope: KeyScope) -> None:
    asks = scope_needed(route[0], sample(route[1]))
    opens = asks is None or Principal("p", "k", frozenset({scope})).allows(asks)
    assert opens == (needs is None or scope in SUFFICIENT[needs])


def test_the_table_has_no_route_that_is_not_there() -> None:
    undocumented = {("GET", "/"), ("GET", "/feedback.js")}
    assert {(method, path.replace(":path", "")) for method, path in ROUTES} - undocumented <= EXPECTED.keys()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("", "/v1/", "/nosuch", "/openapi.json", "/docs", "/admin", "/v1", "/v1/v1")),
        *(("GET", path) for path in ("/healthz/", "/healthz\n", "/readyz/x", "//healthz", "/HEALTHZ", "/v1/models/")),
        *(("GET", path) for path in ("/v1/trajectories/a/b", "/v1/trajectories/", "/v1/admin/keys", "/v1/metrics")),
        *(
            ("POST", path)
            for path in ("/v1/chat/completions/", "/v1/load_lora_adapter", "/pause", "/v1/trajectories/a/b/end")
        ),
        ("POST", "/v1/reviews"),
    ],
)
def test_whatever_is_unknown_is_for_admins(method: str, path: str) -> None:
    assert scope_needed(method, path) == "admin"


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("GET", "/v1/chat/completions", "inference"),
        ("PUT", "/tokenize", "inference"),
        ("GET", "/v1/feedback", "feedback"),
        ("GET", "/v1/groups/g/close", "feedback"),
        ("GET", "/v1/feedback/tokens", "feedback"),
        ("DELETE", "/v1/feedback/tokens", "feedback"),
        *((method, "/v1/trajectories/t", "feedback") for method in ("DELETE", "PUT", "PATCH")),
        *((method, "/healthz", None) for method in ("HEAD", "POST", "OPTIONS", "get")),
        ("POST", "/chat/completions", "inference"),
        ("GET", "/models/org/name", "inference"),
        ("GET", "/trajectories/t", "feedback"),
        ("POST", "/v1/v1/messages", "inference"),
        ("POST", "/v1/tokenize", "inference"),
    ],
)
def test_what_is_no_route_but_almost_one_needs_what_that_one_needs(
    method: str, path: str, needs: KeyScope | None
) -> None:
    assert (method, path) not in EXPECTED
    assert scope_needed(method, path) == needs


def test_a_models_name_may_hold_anything() -> None:
    assert scope_needed("GET", "/v1/models/org/name@v3\n") == "inference"


@pytest.mark.parametrize("table", [schema.trajectories, schema.groups, schema.feedback], ids=lambda table: table.name)
def test_of_every_text_that_is_answered_it_is_decided_who_reads_it(table: Table) -> None:
    columns = {column.name for column in table.columns if isinstance(column.type, Text | JSON)}
    assert columns - CONTENT - HIDDEN <= PLAIN
    assert not PLAIN & CONTENT
