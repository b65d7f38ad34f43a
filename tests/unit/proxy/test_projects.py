"""Two projects behind one proxy: every route, with every kind of key, for what is the asker's own and the other's."""

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from migrations import schema
from proxy.admission.api_keys import scope_needed
from proxy.domain.address import RECORDED, RESPONSES
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, identified, settings_for, wait_for
from whetstone.domain.api_keys import SUFFICIENT, KeyScope, hash_of, new_key
from whetstone.registry import api_key_store

HOME, OTHER = "default", "acme"
POLICY = {HOME: "starter", OTHER: "acme-agent"}
SCOPES: tuple[KeyScope, ...] = ("inference", "feedback", "admin")
CHAT = "/v1/chat/completions"
ROOT = ("GET", "/")
"""It leads to the dashboard, with any key and without."""
SCRIPT = ("GET", "/feedback.js")
TOKENS = ("POST", "/v1/feedback/tokens")
OPEN = {("GET", "/health"), ("GET", "/healthz"), ("GET", "/readyz")}
AS_UNKNOWN = {
    ("POST", "/v1/trajectories/{trajectory_id}/end"): 202,
    ("POST", "/v1/groups/{group_id}/close"): 202,
    ("POST", "/v1/feedback"): 202,
    TOKENS: 201,
    ("DELETE", "/admin/trajectories/{trajectory_id}"): 200,
    ("DELETE", "/admin/users/{user:path}"): 200,
}
"""What may come before what it is about, or after: taken, whoever's it is, and never found."""
CANCEL = ("POST", "/v1/responses/{response_id}/cancel")
"""Refused: nothing is served in the background."""
OF_ALL = ("GET", "/metrics")
"""Tells of all projects: the home project's alone."""
LAST = ("/admin/users", "/admin/trajectories", "/admin/keys")
"""Deletes what other routes are about."""


class World:
    """Both projects with something in each, and their keys."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.keys = {(project, scope): self._key(project, scope) for project in POLICY for scope in SCOPES}
        self.ids = {project: self._live(project) for project in POLICY}

    def _key(self, project: str, *scopes: KeyScope, **values: Any) -> str:
        key_id, key = new_key()
        with self.proxy.engine.begin() as connection:
            made = api_key_store.KeyRecord(project, f"{project}'s", list(scopes), datetime.now(UTC), **values)
            api_key_store.create(connection, made, key_id, hash_of(key.encode()))
        return key

    def over(self, project: str) -> list[str]:
        """Keys that were right once."""
        expired = self._key(project, "admin", expires_at=datetime.now(UTC) - timedelta(seconds=1))
        revoked = self._key(project, "admin")
        with self.proxy.engine.begin() as connection:
            api_key_store.revoke(connection, revoked.split("_")[1], datetime.now(UTC))
        return [expired, revoked]

    def _live(self, project: str) -> dict[str, str]:
        """What an app of the project did, its words marked as the project's."""
        trajectory_id, group_id = f"{project}-trajectory", f"{project}-group"
        headers = {
            "X-Trajectory-Id": trajectory_id,
            "X-Group-Id": group_id,
            "X-Metadata": f'{{"of": "{project}-words"}}',
        }
        messages = [{"role": "user", "content": f"{project}-words"}]
        body = {"model": POLICY[project], "messages": messages, "user": f"{project}-user"}
        self._until_known(project)
        answer = self.ask(self.keys[project, "inference"], "POST", CHAT, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        self.proxy.recorded(project=project)
        said = {"trajectory_id": trajectory_id, "reward": 1.0, "comment": f"{project}-words"}
        feedback = self.ask(self.keys[project, "feedback"], "POST", "/v1/feedback", json=said).json()
        asks = body_for(RESPONSES, {"policy": POLICY[project]})
        response = self.ask(self.keys[project, "inference"], "POST", RESPONSES, json=asks)
        assert response.status_code == 200, response.text
        self.proxy.recorded(2, project=project)
        ids = {
            "trajectory_id": trajectory_id,
            "group_id": group_id,
            "feedback_id": feedback["id"],
            "response_id": response.json()["id"],
        }
        return ids | {
            "policy": POLICY[project],
            "name:path": POLICY[project],
            "user:path": f"{project}-user",
            "key_id": self._key(project, "feedback").split("_")[1],
        }

    def _until_known(self, project: str) -> None:
        """The proxy reads keys now and then, so maybe half of them; until it has read the first one, it needs none."""
        key = self.keys[project, "inference"]
        wait_for(lambda: POLICY[project] in self.ask(key, "GET", "/v1/models").text)
        for theirs in self.keys.values():
            wait_for(lambda own=theirs: self.ask(own, "GET", "/v1/models").status_code != 401)
        wait_for(lambda: self.ask(None, "GET", "/v1/models").status_code == 401)

    def ask(self, key: str | None, method: str, path: str, **values: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.proxy.client.request(method, path, headers=headers | values.pop("headers", {}), **values)

    def routes(self) -> list[tuple[str, str]]:
        api = [route for route in self.proxy.app.tenants[HOME].api.routes if isinstance(route, APIRoute)]
        told = [(method, route.path) for route in api for method in route.methods]
        return sorted([*told, *(("POST", path) for path in RECORDED)])


@pytest.fixture
def world(database_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[..., RunningProxy]) -> World:
    fake_vllm.base_names += [f"{policy}@v0" for policy in POLICY.values()]
    settings = settings_for(
        database_url,
        fake_vllm.url,
        tmp_path,
        projects={OTHER: {"policies": [POLICY[OTHER]]}},
        vllm={"max_loras": 8},
    )
    return World(start(settings))


def body_for(path: str, ids: dict[str, str]) -> dict[str, Any] | None:
    """A body that means what is of these ids."""
    messages = [{"role": "user", "content": "hi"}]
    if path in (CHAT, "/v1/messages"):
        return {"model": ids["policy"], "messages": messages, "max_tokens": 4}
    if path == "/v1/completions":
        return {"model": ids["policy"], "prompt": "hi"}
    if path == RESPONSES:
        return {"model": ids["policy"], "input": "hi"}
    if path == "/v1/feedback":
        return {"trajectory_id": ids["trajectory_id"], "reward": 0.5}
    if path == TOKENS[1]:
        return {"completion_id": ids["response_id"]}
    if path.endswith("/promote"):
        return {"version": 0}
    if path.endswith("/state"):
        return {"state": "training"}
    if path.endswith("/pin"):
        return {"version": 0, "pinned": True}
    if path == "/admin/keys":
        return {"name": "another", "scopes": ["feedback"]}
    return None


def filled(path: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def asked(world: World, route: tuple[str, str], key: str | None, of: str) -> httpx.Response:
    method, path = route
    ids = world.ids[of]
    return world.ask(key, method, filled(path, ids), json=body_for(path, ids) if method == "POST" else None)


def is_about_something(route: tuple[str, str]) -> bool:
    return "{" in route[1] or route[1] in RECORDED or route[1].startswith("/v1/feedback")


def test_without_a_right_key_nothing_opens_and_every_wrong_one_is_answered_alike(world: World) -> None:
    wrong = [new_key()[1], "sk-x", "wsk_x", *world.over(HOME), *world.over(OTHER)]
    wait_for(lambda: all(world.ask(key, "GET", "/v1/models").status_code == 401 for key in wrong))
    for route in world.routes():
        if route == ROOT:
            answers = {asked(world, route, key, HOME).headers["location"] for key in (None, *wrong)}
            assert answers == {"/ui"}
            continue
        if route == SCRIPT:
            assert world.ask(None, *SCRIPT).headers["content-type"].startswith("text/javascript")
            continue
        if route in OPEN:
            answer = asked(world, route, None, HOME)
            assert answer.content == b"" if route == ("GET", "/health") else set(answer.json()) == {"status"}
            continue
        answers = {(answer.status_code, answer.content) for key in wrong for answer in [asked(world, route, key, HOME)]}
        assert len(answers) == 1, (route, answers)
        ((status, body),) = answers
        assert status == 401 and b'"invalid_api_key"' in body, route
        none = asked(world, route, None, HOME)
        assert (none.status_code, none.json()["error"]["code"]) == (401, "missing_api_key"), route


def test_a_key_opens_what_its_scope_says_and_no_more(world: World) -> None:
    for route, project, scope in itertools.product(world.routes(), POLICY, SCOPES):
        needs = scope_needed(*route)
        if needs is None or scope in SUFFICIENT[needs]:
            continue
        answer = asked(world, route, world.keys[project, scope], project)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope"), (route, scope)
        assert needs in answer.json()["error"]["message"]


def test_ones_own_is_answered(world: World) -> None:
    for project in (OTHER, HOME):
        for route in sorted(world.routes(), key=lambda one: (one[1].startswith(LAST), one[0] == "DELETE")):
            answer = asked(world, route, world.keys[project, "admin"], project)
            if (route, project) == (OF_ALL, OTHER):
                assert answer.status_code == 403
                continue
            if route == ROOT:
                assert answer.headers["location"] == "/ui"
                continue
            if route == TOKENS:
                assert answer.json()["token"].startswith("wft_")
            if route == CANCEL:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_id")
                continue
            # A version that is live cannot be promoted or rolled back, nor a policy that records take a step.
            assert answer.status_code < 300 or answer.status_code == 409, (route, project, answer.text)


def test_the_others_is_as_if_it_were_not_there_and_stays_as_it_is(world: World) -> None:
    for mine, theirs in ((HOME, OTHER), (OTHER, HOME)):
        before = rows_of(world, theirs)
        for route, scope in itertools.product(world.routes(), SCOPES):
            needs = scope_needed(*route)
            if scope != "admin" and (needs is None or scope not in SUFFICIENT[needs]):
                continue
            answer = asked(world, route, world.keys[mine, scope], theirs)
            for word in (f"{theirs}-words", f"{theirs}-user", f"{theirs}'s"):
                assert word not in answer.text, (route, word)
            if not is_about_something(route):
                assert POLICY[theirs] not in answer.text or (route, mine) == (OF_ALL, HOME), route
            elif route in AS_UNKNOWN:
                assert answer.status_code == AS_UNKNOWN[route], route
            else:
                assert answer.status_code == 404, (route, answer.text)
                assert answer.text == as_unknown(world, route, world.keys[mine, scope], theirs), route
        assert rows_of(world, theirs) == before


def as_unknown(world: World, route: tuple[str, str], key: str, of: str) -> str:
    """What is told of something that nobody has, under the name that was asked for."""
    method, path = route
    ids = world.ids[of]
    unknown = {name: f"no-{place}" for place, name in enumerate(ids)}
    json = body_for(path, unknown) if method == "POST" else None
    text = world.ask(key, method, filled(path, unknown), json=json).text
    for name, value in unknown.items():
        text = text.replace(value, ids[name])
    return text


def rows_of(world: World, project: str) -> dict[str, list[Any]]:
    """Every row of the project; what the proxy itself notes of keys' use aside."""
    tables = [table for table in schema.metadata.sorted_tables if "project" in table.c]
    aside = {"api_keys", "replicas", "proxies"}
    with world.proxy.engine.connect() as connection:
        return {
            table.name: sorted(map(repr, connection.execute(table.select().where(table.c.project == project))))
            for table in tables
            if table.name not in aside
        }


def test_a_request_that_refers_to_another_projects_response_is_as_if_it_were_not_there(world: World) -> None:
    for mine, theirs in ((HOME, OTHER), (OTHER, HOME)):
        body, key = {"model": POLICY[mine], "input": "hi"}, world.keys[mine, "inference"]
        for name in (world.ids[theirs]["response_id"], "resp_none"):
            answer = world.ask(key, "POST", RESPONSES, json=body | {"previous_response_id": name})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Previous response with id '{name}' not found."
            item = name.replace("resp_", "msg_") + "_0"
            items = [{"type": "item_reference", "id": item}]
            answer = world.ask(key, "POST", RESPONSES, json=body | {"input": items})
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"Item with id '{item}' not found."
        own = body | {"previous_response_id": world.ids[mine]["response_id"]}
        assert world.ask(key, "POST", RESPONSES, json=own).status_code == 200


def test_feedback_of_another_project_finds_nothing(world: World) -> None:
    key = world.keys[HOME, "feedback"]
    theirs = world.ids[OTHER]["trajectory_id"]
    taken = world.ask(key, "POST", "/v1/feedback", json={"trajectory_id": theirs, "reward": -1.0}).json()
    (row,) = world.proxy.rows(schema.feedback, id=taken["id"])
    assert (row.project, row.trajectory_id, row.state) == (HOME, None, "waiting")


def test_the_same_ids_in_two_projects_are_two_trajectories(world: World) -> None:
    for project in POLICY:
        body = {"model": POLICY[project], "messages": [{"role": "user", "content": "hi"}]}
        headers = {"X-Trajectory-Id": "shared", "Idempotency-Key": "shared"}
        answer = world.ask(world.keys[project, "inference"], "POST", CHAT, json=body, headers=headers)
        assert answer.status_code == 200
    rows = world.proxy.recorded(2, trajectory_id="shared")
    assert {(row.project, row.policy) for row in rows} == set(POLICY.items())


def conversation(world: World, key: str, model: str, *more: dict[str, str]) -> httpx.Response:
    messages = [{"role": "user", "content": "hello"}, *more]
    return world.ask(key, "POST", CHAT, json={"model": model, "messages": messages})


GOES_ON = ({"role": "assistant", "content": "Hello"}, {"role": "user", "content": "and then?"})


def test_a_conversation_is_gone_on_with_by_its_own_key_alone(world: World) -> None:
    first, second = world.keys[HOME, "inference"], world.keys[HOME, "admin"]
    began = conversation(world, first, "starter").headers["x-trajectory-id"]
    assert conversation(world, second, "starter", *GOES_ON).headers["x-trajectory-id"] != began
    went_on = conversation(world, first, "starter", *GOES_ON)
    assert (went_on.headers["x-trajectory-id"], went_on.headers["x-threaded-by"]) == (began, "content")


def test_an_idempotency_key_repeats_the_answer_to_its_own_key_alone(world: World) -> None:
    body = {"model": "starter", "messages": [{"role": "user", "content": "hi"}]}
    ids = [
        world.ask(key, "POST", CHAT, json=body, headers={"Idempotency-Key": "again"}).headers["x-completion-id"]
        for key in (world.keys[HOME, scope] for scope in ("inference", "inference", "admin"))
    ]
    assert ids[0] == ids[1] != ids[2]


def test_what_was_asked_with_a_key_says_so_and_the_key_is_nowhere(world: World) -> None:
    key = world.keys[HOME, "inference"]
    (row,) = world.proxy.rows(trajectory_id=world.ids[HOME]["trajectory_id"])
    assert row.key_id == key.split("_")[1]
    (feedback,) = world.proxy.rows(schema.feedback, id=world.ids[HOME]["feedback_id"])
    assert feedback.key_id == world.keys[HOME, "feedback"].split("_")[1]
    secret = key.split("_")[2]
    everything = repr([rows_of(world, project) for project in POLICY]) + repr(world.proxy.rows(schema.api_keys))
    assert secret not in everything


def test_a_key_that_is_revoked_opens_nothing_from_the_next_request_on(world: World) -> None:
    admin, key = world.keys[HOME, "admin"], world.keys[HOME, "inference"]
    assert world.ask(key, "GET", "/v1/models").status_code == 200
    assert world.ask(admin, "DELETE", f"/admin/keys/{key.split('_')[1]}").status_code == 200
    assert world.ask(key, "GET", "/v1/models").status_code == 401


@pytest.fixture
def fake_vllm() -> Iterator[FakeVllm]:
    fake = FakeVllm(base_names=[f"{policy}@v0" for policy in POLICY.values()])
    fake.script = identified
    yield fake
    fake.close()


def test_a_key_whose_requests_are_used_up_is_told_when_to_come_back(world: World) -> None:
    key = world._key(HOME, "inference", requests_per_min=2)
    answers = []
    while not answers or answers[-1].status_code == 401:
        answers = [conversation(world, key, "starter")]
    answers += [conversation(world, key, "starter") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"


def test_tokens_are_counted_once_they_are_known(world: World) -> None:
    key = world._key(HOME, "inference", tokens_per_min=5)
    answers = []
    while not answers or answers[-1].status_code == 401:
        answers = [conversation(world, key, "starter")]  # three read, three said
    answers.append(conversation(world, key, "starter"))
    assert [answer.status_code for answer in answers] == [200, 429]
