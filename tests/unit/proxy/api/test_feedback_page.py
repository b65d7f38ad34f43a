"""Feedback from web pages, through the app: whom a token lets in, to what, and what a browser is allowed."""

import gzip
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from migrations import schema
from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.admission.middleware import RATINGS_PER_MIN
from proxy.admission.token_secrets import read_secrets
from proxy.api.feedback_page import MAX_LIFETIME_S, SCRIPT
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for
from whetstone.config.settings import Settings
from whetstone.domain.api_keys import KeyScope, hash_of, new_key
from whetstone.registry import api_key_store

ORIGIN = "https://app.example.com"
OTHER = "acme"


class Site:
    """An app behind a proxy with keys, and the page that its users see."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.keys = {scope: self.make_key(scope) for scope in ("inference", "feedback", "admin")}
        self.other_key = self.make_key("inference", OTHER)
        # Until the proxy has read the first key, it needs none.
        wait_for(lambda: self.proxy.client.get("/v1/models").status_code == 401)
        for key in (*self.keys.values(), self.other_key):
            wait_for(lambda key=key: self.post("/v1/feedback/tokens", key, {}).status_code == 400)

    def make_key(self, scope: Any, project: str = "default") -> str:
        key_id, key = new_key()
        scopes: list[KeyScope] = [scope]
        with self.proxy.engine.begin() as connection:
            made = api_key_store.KeyRecord(project, "app", scopes, datetime.now(UTC))
            api_key_store.create(connection, made, key_id, hash_of(key.encode()))
        return key

    def post(self, path: str, key: str, body: Any) -> httpx.Response:
        return self.proxy.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    def answer(self, **headers: str) -> httpx.Response:
        answer = self.proxy.chat({"Authorization": f"Bearer {self.keys['inference']}"} | headers)
        assert answer.status_code == 200, answer.text
        return answer

    def token(self, completion_id: str, key: str | None = None, **values: Any) -> str:
        made = self.post(
            "/v1/feedback/tokens", key or self.keys["inference"], {"completion_id": completion_id} | values
        )
        assert made.status_code == 201, made.text
        return str(made.json()["token"])

    def rate(self, token: str, body: Any = None, **headers: str) -> httpx.Response:
        """What `feedback.js` does, in the browser of a user."""
        sent = {"Origin": ORIGIN, "X-Feedback-Token": token} | headers
        return self.proxy.client.post("/v1/feedback", json=body or {"thumbs": "up"}, headers=sent)

    def feedback(self) -> list[Any]:
        return self.proxy.rows(schema.feedback)


@pytest.fixture(scope="module")
def module_site(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    data = tmp_path_factory.mktemp("site")
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    with FakeVllm(base_names=("starter@v0", "acme-agent@v0")) as fake:
        settings = settings_for(
            f"sqlite:///{data / 'whetstone.db'}",
            fake.url,
            data,
            projects={OTHER: {"policies": ["acme-agent"]}},
            vllm={"max_loras": 8},
            proxy={"cors_origins": [ORIGIN], "feedback_tokens": True, "max_wait_s": 0.2},
        )
        proxy = RunningProxy(settings)
        yield Site(proxy)
        proxy.stop()


@pytest.fixture
def site(module_site: Site) -> Site:
    """With no feedback yet."""
    with module_site.proxy.engine.begin() as connection:
        connection.execute(schema.feedback.delete())
    return module_site


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and code; the page can read them."""
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    return answer.status_code, answer.json()["error"]["code"]


def test_a_page_rates_the_answer_whose_token_it_has(site: Site) -> None:
    answer = site.answer()
    token = answer.headers["x-feedback-token"]
    taken = site.rate(token, {"thumbs": "down", "comment": "<b>wrong</b> city"})
    assert (taken.status_code, taken.json().get("target")) == (202, "known"), taken.text
    (row,) = site.feedback()
    assert (row.target_kind, row.target_id, row.choice) == ("completion", answer.headers["x-completion-id"], 0)
    assert (row.reward, row.source, row.comment, row.final) == (0.0, "thumbs", "<b>wrong</b> city", False)
    assert row.key_id == site.keys["inference"].split("_")[1], "the key of the request for the answer"


def test_a_stream_carries_its_token_too(site: Site) -> None:
    key = {"Authorization": f"Bearer {site.keys['inference']}"}
    streamed = site.proxy.chat(key, stream=True)
    assert site.rate(streamed.headers["x-feedback-token"]).status_code == 202
    assert site.feedback()[0].target_id == streamed.headers["x-completion-id"]


def test_an_answer_that_is_sent_again_has_a_token_of_its_own_and_none_is_stored(site: Site) -> None:
    first, again = (site.answer(**{"Idempotency-Key": "again"}) for _ in range(2))
    assert first.headers["x-completion-id"] == again.headers["x-completion-id"]
    assert site.rate(again.headers["x-feedback-token"]).status_code == 202
    assert site.feedback()[0].target_id == first.headers["x-completion-id"]
    (row,) = wait_for(lambda: [row for row in site.proxy.rows() if row.reply is not None])
    assert b"wft_" not in row.reply


@pytest.mark.parametrize("scope", ["inference", "feedback", "admin"])
def test_the_apps_server_asks_for_a_token_by_the_answers_own_id(site: Site, scope: str) -> None:
    token = site.token("chatcmpl-abc", site.keys[scope], choice=1)
    assert site.rate(token).status_code == 202
    (row,) = site.feedback()
    assert (row.target_id, row.choice, row.key_id) == ("chatcmpl-abc", 1, site.keys[scope].split("_")[1])


def test_a_token_says_until_when_it_is_valid(site: Site) -> None:
    before_s = datetime.now(UTC).timestamp()
    body = {"completion_id": "c", "expires_in_s": 600}
    made = site.post("/v1/feedback/tokens", site.keys["feedback"], body).json()
    assert made | {"token": "", "expires_at": 0} == {
        "object": "feedback.token", "token": "", "expires_at": 0, "completion_id": "c", "choice": 0,
    }  # fmt: skip
    assert before_s + 600 <= made["expires_at"] <= before_s + 660
    assert datetime.now(UTC).timestamp() - before_s < 50, "or the bound above means nothing"


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"completion_id": "a b"}, {"completion_id": 1}, {"completion_id": "c", "choice": -1}),
        *({"completion_id": "c", "expires_in_s": seconds} for seconds in (0, -1, 1.5, MAX_LIFETIME_S + 1)),
        *({"completion_id": "c", "reward": 1}, {"trajectory_id": "t"}, []),
    ],
)
def test_a_token_for_nothing_is_not_made(site: Site, body: Any) -> None:
    assert site.post("/v1/feedback/tokens", site.keys["feedback"], body).status_code == 400


def test_a_token_makes_no_token_and_opens_no_other_route(site: Site) -> None:
    token = site.token("c")
    for method, path in (
        ("POST", "/v1/feedback/tokens"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
        ("GET", "/v1/feedback/x"), ("POST", "/v1/trajectories/t/end"), ("GET", "/admin/keys"),
    ):  # fmt: skip
        for headers in ({"X-Feedback-Token": token}, {"Authorization": f"Bearer {token}"}):
            assert site.proxy.client.request(method, path, headers=headers, json={}).status_code == 401, path


def test_a_token_comes_as_bearer_too(site: Site) -> None:
    body = {"thumbs": "up"}
    assert site.post("/v1/feedback", site.token("c1"), body).status_code == 202
    reward = site.post("/v1/feedback", site.token("c1"), {"completion_id": "c1", "reward": 9})
    assert (reward.status_code, reward.json()["error"]["code"]) == (403, "not_for_feedback_token")


@pytest.mark.parametrize(
    "body",
    [
        *({"thumbs": "up", "completion_id": "c2"}, {"thumbs": "up", "choice": 1}, {"completion_id": "c1", "reward": 1}),
        *({"trajectory_id": "t", "thumbs": "up"}, {"thumbs": "up", "demonstration": "Paris"}),
    ],
)
def test_another_completion_and_more_than_a_thumb_are_refused(site: Site, body: dict[str, Any]) -> None:
    assert refused(site.rate(site.token("c1"), body)) == (403, "not_for_feedback_token")
    assert site.feedback() == []


def test_a_batch_is_refused(site: Site) -> None:
    assert site.rate(site.token("c1"), [{"thumbs": "up"}]).status_code == 400
    assert site.feedback() == []


def test_a_body_beyond_any_comment_is_refused(site: Site) -> None:
    assert refused(site.rate(site.token("c1"), {"thumbs": "up", "comment": "x" * 40_000})) == (413, "body_too_large")


def signed_by_the_proxy(site: Site, *claim: Any, at_s: float = 0) -> str:
    """A token with the proxy's own secret: `project, key_id, completion_id, choice, expires_at_s`."""
    data = site.proxy.settings.data
    return FeedbackTokens(read_secrets(data, {}), 60, lambda: at_s).sign(*claim)


def test_expired_forged_revoked_and_foreign_tokens_are_refused(site: Site) -> None:
    key_id, now_s = site.keys["inference"].split("_")[1], int(datetime.now(UTC).timestamp())
    good = signed_by_the_proxy(site, "default", key_id, "c1", 0, now_s + 60)
    assert site.rate(good).status_code == 202
    expired = signed_by_the_proxy(site, "default", key_id, "c1", 0, now_s - 1)
    assert refused(site.rate(expired)) == (401, "feedback_token_expired")
    forged = FeedbackTokens([b"x" * 32], 60).sign("default", key_id, "c1")
    unknown = signed_by_the_proxy(site, "default", "unknownkey00", "c1", 0, now_s + 60)
    without_key = signed_by_the_proxy(site, "default", None, "c1", 0, now_s + 60)
    other_project = signed_by_the_proxy(site, OTHER, key_id, "c1", 0, now_s + 60)
    no_project = signed_by_the_proxy(site, "nowhere", key_id, "c1", 0, now_s + 60)
    for token in (forged, unknown, without_key, other_project, no_project, good[:-2], "", "wft_"):
        assert refused(site.rate(token)) == (401, "invalid_feedback_token")
    assert len(site.feedback()) == 1


def test_a_token_ends_with_its_key(site: Site) -> None:
    key = site.make_key("feedback")
    wait_for(lambda: site.post("/v1/feedback/tokens", key, {}).status_code == 400)
    token = site.token("c1", key)
    assert site.rate(token).status_code == 202
    with site.proxy.engine.begin() as connection:
        api_key_store.revoke(connection, key.split("_")[1], datetime.now(UTC))
    wait_for(lambda: site.rate(token).status_code == 401)


@pytest.mark.parametrize("scope", ["inference", "feedback", "admin"])
def test_an_api_key_in_the_place_of_a_token_is_refused_whatever_it_opens(site: Site, scope: str) -> None:
    answer = site.rate(site.keys[scope])
    assert refused(answer) == (401, "invalid_feedback_token")
    assert "An API key must never be in a web page" in answer.json()["error"]["message"]
    both = site.rate(site.keys[scope], {"trajectory_id": "t", "reward": 1}, Authorization=f"Bearer {site.keys[scope]}")
    assert refused(both) == (401, "invalid_feedback_token")
    assert site.feedback() == []


def test_another_projects_token_rates_nothing_here(site: Site) -> None:
    answer = site.answer()
    token = site.token(answer.headers["x-completion-id"], site.other_key)
    assert site.rate(token).json()["target"] == "unknown yet"
    assert site.feedback()[0].project == OTHER


def test_a_completion_is_rated_a_few_times_a_minute(site: Site) -> None:
    token = site.token("often")
    codes = [site.rate(token).status_code for _ in range(RATINGS_PER_MIN + 1)]
    assert codes == [202] * RATINGS_PER_MIN + [429]
    assert "feedback token" in site.rate(token).json()["error"]["message"]
    assert site.rate(site.token("seldom")).status_code == 202


def test_a_page_is_let_in_by_its_origin(site: Site) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-feedback-token"}
    preflight = site.proxy.client.options("/v1/feedback", headers={"Origin": ORIGIN} | asks)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
    token = site.token("c1")
    assert site.rate(token).headers["access-control-allow-origin"] == ORIGIN
    evil = site.rate(token, Origin="https://evil.example")
    assert evil.status_code == 403 and "access-control-allow-origin" not in evil.headers
    assert len(site.feedback()) == 1


def test_without_the_setting_answers_have_no_token(plain_proxy: RunningProxy) -> None:
    assert "x-feedback-token" not in plain_proxy.chat().headers


def test_before_any_key_is_made_a_token_works_on_this_machine_and_not_afterwards(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[[Settings], RunningProxy]
) -> None:
    page = "http://localhost:3000"
    proxy = start(
        settings_for(sqlite_url, fake_vllm.url, tmp_path, proxy={"feedback_tokens": True, "cors_origins": [page]})
    )
    headers = {"Origin": page, "X-Feedback-Token": proxy.chat().headers["x-feedback-token"]}
    taken = proxy.client.post("/v1/feedback", json={"thumbs": "up"}, headers=headers)
    assert (taken.status_code, taken.headers["access-control-allow-origin"]) == (202, page)
    key_id, key = new_key()
    with proxy.engine.begin() as connection:
        made = api_key_store.KeyRecord("default", "first", ["admin"], datetime.now(UTC))
        api_key_store.create(connection, made, key_id, hash_of(key.encode()))
    wait_for(lambda: proxy.client.post("/v1/feedback", json={"thumbs": "up"}, headers=headers).status_code == 401)


# --- the script


def test_the_script_is_served_to_everyone(site: Site) -> None:
    script = site.proxy.client.get("/feedback.js")
    assert (script.status_code, script.content) == (200, SCRIPT.read_bytes())
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert script.headers["x-content-type-options"] == "nosniff"


def test_the_script_is_small() -> None:
    assert len(gzip.compress(SCRIPT.read_bytes(), mtime=0)) <= 3 * 1024


def test_the_script_makes_text_only_and_loads_nothing() -> None:
    script = SCRIPT.read_text(encoding="utf-8")
    parses = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|srcdoc"
    reads_more = r"\bimport\b|require\(|cookie|localStorage"
    assert not re.findall(f"{parses}|{reads_more}", script)
    assert "textContent" in script
    # What the page sets reaches an element as its text, or as the value of one of these attributes.
    assert set(re.findall(r'setAttribute\((?!key, value)"?([\w-]+)', script)) == {"role", "aria-pressed"}
    assert not re.findall(r"https?://", script)
