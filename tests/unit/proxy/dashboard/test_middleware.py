"""Who may look at the dashboard: sessions by key, forms of one's own, nothing from elsewhere, one project each."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from migrations import schema
from proxy.dashboard import assets, session
from proxy.dashboard.pages.registry import ACTIONS, PAGES
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, own_process, settings_for, wait_for
from whetstone.domain.api_keys import KeyScope, hash_of, new_key
from whetstone.registry import api_key_store

CLOSED = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
}


def make_key(
    proxy: RunningProxy, *scopes: KeyScope, project: str = "default", name: str = "a person's", **values: Any
) -> str:
    key_id, key = new_key()
    with proxy.engine.begin() as connection:
        made = api_key_store.KeyRecord(project, name, list(scopes), datetime.now(UTC), **values)
        api_key_store.create(connection, made, key_id, hash_of(key.encode()))
    wait_for(lambda: proxy.client.get("/v1/models", headers={"x-api-key": key}).status_code != 401)
    wait_for(lambda: proxy.client.get("/v1/models").status_code == 401)
    return key


class Person:
    """A browser without the window: keeps cookies, fills in forms."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.client = httpx.Client(base_url=proxy.url, trust_env=False, verify=False, timeout=30)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def csrf(self, page: str = "/ui/policies") -> str:
        match = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.client.get(page, follow_redirects=True).text)
        assert match
        return match[1]

    def send(self, path: str, page: str = "/ui/policies", /, **fields: str) -> httpx.Response:
        headers = {"origin": str(self.client.base_url).rstrip("/")}
        return self.client.post(path, data={"csrf": self.csrf(page), **fields}, headers=headers)

    def sign_in(self, key: str, **fields: str) -> httpx.Response:
        return self.send("/ui/sign-in", "/ui/sign-in", key=key, **fields)


@pytest.fixture
def person(plain_proxy: RunningProxy) -> Iterator[Person]:
    person = Person(plain_proxy)
    yield person
    person.client.close()


def sessions(proxy: RunningProxy) -> list[Any]:
    with proxy.engine.connect() as connection:
        return list(connection.execute(select(schema.ui_sessions)))


def test_every_answer_is_closed_off(person: Person) -> None:
    for path in ("/ui/policies", "/ui/nosuch", "/ui/static/app.css", "/ui", "/ui/sign-in"):
        headers = person.get(path).headers
        assert {name: headers[name] for name in CLOSED} == CLOSED
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] in ("no-store", "no-cache"), path


def test_on_loopback_without_keys_nobody_signs_in(person: Person) -> None:
    answer = person.get("/ui/policies")
    assert answer.status_code == 200 and "Sign out" not in answer.text
    assert person.get("/ui/sign-in").headers["location"] == "/ui/policies"


def test_with_keys_a_page_asks_to_sign_in_and_comes_back(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    answer = person.get("/ui/policies/starter?versions_before=3")
    assert (answer.status_code, answer.text) == (303, "")
    assert answer.headers["location"] == "/ui/sign-in?next=/ui/policies/starter%3Fversions_before%3D3"
    answer = person.sign_in(key, next="/ui/policies/starter?versions_before=3")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/policies/starter?versions_before=3")
    assert person.get("/ui/policies").status_code == 200


def test_the_cookie_is_a_random_token_of_which_only_a_hash_is_kept(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    before = person.client.cookies.get(session.COOKIE)
    cookie = person.sign_in(key).headers["set-cookie"]
    token = person.client.cookies.get(session.COOKIE)
    assert token is not None and token != before
    assert re.fullmatch(rf"{session.COOKIE}={token}; Path=/ui; HttpOnly; SameSite=Strict; Max-Age=43200", cookie)
    (row,) = sessions(plain_proxy)
    assert row.id == session.hash_of(token) and token not in str(row)
    assert key not in str(row) and key.split("_")[2] not in cookie
    assert row.expires_at - row.created_at == timedelta(hours=12)


def test_a_link_from_another_site_signs_nobody_out(plain_proxy: RunningProxy, person: Person) -> None:
    """It brings no session's cookie: the answer must not put another in its place."""
    person.sign_in(make_key(plain_proxy, "admin"))
    arrived = httpx.get(plain_proxy.url + "/ui/policies", trust_env=False, verify=False)
    assert arrived.status_code == 303
    assert all(one.startswith(session.FORM) for one in arrived.headers.get_list("set-cookie"))
    person.client.cookies.update(arrived.cookies)
    assert person.get("/ui/policies").status_code == 200


def test_a_form_of_countless_fields_is_not_read(plain_proxy: RunningProxy, person: Person) -> None:
    make_key(plain_proxy, "admin")
    answer = person.client.post("/ui/sign-in", content=b"a=%41&" * 40_000)
    assert answer.status_code == 400


def test_over_tls_the_cookie_is_secure(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    fields = {"csrf": person.csrf("/ui/sign-in"), "key": key}
    origin = str(person.client.base_url).replace("http:", "https:").rstrip("/")
    answer = person.client.post("/ui/sign-in", data=fields, headers={"origin": origin})
    assert answer.headers["set-cookie"].endswith("; Secure")


def test_a_wrong_key_is_refused_like_any_other(plain_proxy: RunningProxy, person: Person) -> None:
    make_key(plain_proxy, "admin")
    for wrong in ("", "wsk_no", new_key()[1]):
        answer = person.sign_in(wrong)
        assert answer.status_code == 401 and ("opens nothing here" if wrong else "no API key came") in answer.text
        assert "text/html" in answer.headers["content-type"]
    assert sessions(plain_proxy) == []


def test_a_key_that_is_no_admins_is_told_so(plain_proxy: RunningProxy, person: Person) -> None:
    make_key(plain_proxy, "admin")
    answer = person.sign_in(make_key(plain_proxy, "inference", "feedback"))
    assert answer.status_code == 403
    assert "needs a key with the scope admin" in answer.text and sessions(plain_proxy) == []


def test_signing_out_ends_the_session_itself(plain_proxy: RunningProxy, person: Person) -> None:
    person.sign_in(make_key(plain_proxy, "admin"))
    token = person.client.cookies.get(session.COOKIE)
    assert person.send("/ui/sign-out").headers["location"] == "/ui/sign-in"
    assert sessions(plain_proxy) == []
    answer = httpx.get(
        plain_proxy.url + "/ui/policies", cookies={session.COOKIE: str(token)}, trust_env=False, verify=False
    )
    assert answer.status_code == 303


def test_a_session_ends_when_its_key_is_revoked(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    make_key(plain_proxy, "admin")
    person.sign_in(key)
    assert person.get("/ui/policies").status_code == 200
    with plain_proxy.engine.begin() as connection:
        api_key_store.revoke(connection, key.split("_")[1], datetime.now(UTC))
    wait_for(lambda: person.get("/ui/policies").status_code == 303)


def test_a_session_ends_by_its_time(plain_proxy: RunningProxy, person: Person) -> None:
    key = make_key(plain_proxy, "admin")
    person.sign_in(key)
    with plain_proxy.engine.begin() as connection:
        past = datetime.now(UTC) - timedelta(seconds=1)
        connection.execute(update(schema.ui_sessions).values(expires_at=past))
    assert person.get("/ui/policies").status_code == 303
    person.sign_in(key)
    assert len(sessions(plain_proxy)) == 1, "what is over is forgotten"


def test_a_part_of_a_page_whose_session_is_over_sends_the_page_away(plain_proxy: RunningProxy, person: Person) -> None:
    make_key(plain_proxy, "admin")
    answer = person.get("/ui/policies", **{"hx-request": "true"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/ui/sign-in?next=/ui/policies")


def test_a_script_may_look_with_an_admins_key_in_a_header(plain_proxy: RunningProxy, person: Person) -> None:
    admin, app = make_key(plain_proxy, "admin"), make_key(plain_proxy, "inference")
    assert person.get("/ui/policies", authorization=f"Bearer {admin}").status_code == 200
    assert person.get("/ui/policies", authorization=f"Bearer {app}").status_code == 403
    assert person.get("/ui/policies", authorization="Bearer wsk_no").status_code == 401


def test_no_form_is_taken_that_is_not_ours(plain_proxy: RunningProxy, person: Person) -> None:
    stranger = Person(plain_proxy)
    own, foreign = person.csrf(), stranger.csrf()
    stranger.client.close()
    assert own != foreign
    for path in (re.sub(r"\{[^}]+\}", "starter", action.path) for action in ACTIONS):
        for fields in ({}, {"csrf": ""}, {"csrf": foreign}):
            answer = person.client.post(path, data={"state": "paused", **fields})
            assert answer.status_code == 403 and "this form does not belong to your current session" in answer.text
        assert person.get(path).status_code in (404, 200), "a link does nothing"
    (row,) = plain_proxy.rows(schema.policies)
    assert row.state == "recording"


def test_no_other_page_sends_our_forms(person: Person) -> None:
    fields = {"csrf": person.csrf(), "state": "paused"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"):
        answer = person.client.post("/ui/policies/starter/state", data=fields, headers={"origin": origin})
        assert answer.status_code == 403 and "text/html" in answer.headers["content-type"], origin


def test_a_name_that_was_bound_anew_is_refused(person: Person) -> None:
    answer = person.get("/ui/policies", host="evil.example")
    assert answer.status_code == 403 and "not this machine" in answer.text


def test_after_signing_in_nobody_is_sent_elsewhere() -> None:
    for elsewhere in (
        "https://evil.example",
        "//evil.example",
        "/ui/\\evil",
        "/uix",
        "/v1/models",
        "/ui/sign-in",
        "/ui/漢",
        "",
    ):
        assert session.own_path(elsewhere) == "/ui/policies"
    assert session.own_path("/ui/policies/starter?steps_before=3") == "/ui/policies/starter?steps_before=3"


def test_what_an_action_says_is_read_once_and_never_as_html(person: Person) -> None:
    person.send("/ui/policies/starter/state", state="<script>")
    shown = person.get("/ui/policies/starter")
    assert "&lt;script&gt;" in shown.text and "<script>" not in shown.text.replace("<script src", "")
    assert "&lt;script&gt;" not in person.get("/ui/policies/starter").text


@pytest.mark.parametrize("value", ["", "x", "!!!", "gICA", "\x00"])
def test_a_spoilt_word_of_the_last_page_is_nothing(value: str) -> None:
    assert session.decode_notice(value) is None


def test_only_assets_are_served(person: Person) -> None:
    for path in ("../door.py", "vendor/htmx/LICENSE", "", "%2e%2e/app.py"):
        assert person.get("/ui/static/" + path).status_code == 404


def test_an_asset_is_kept_by_its_content(person: Person) -> None:
    page = person.get("/ui/policies").text
    (address,) = re.findall(r'href="(/ui/static/app\.css\?v=[0-9a-f]{12})"', page)
    answer = person.get(address)
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.content == (assets.FOLDER / "app.css").read_bytes()


def test_vendored_files_have_their_licence_and_version() -> None:
    for folder in (assets.FOLDER / "vendor").iterdir():
        assert (folder / "LICENSE").is_file() and re.search(r"\d+\.\d+", (folder / "VERSION").read_text())


def test_no_template_has_anything_inline() -> None:
    templates = Path(assets.FOLDER.parent / "templates").glob("*.html")
    for text in (path.read_text(encoding="utf-8") for path in templates):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|hx-on|\|\s*safe\b", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)", text)


def test_a_session_holds_at_every_proxy(plain_proxy: RunningProxy, person: Person) -> None:
    """Another process with the same database."""
    person.sign_in(make_key(plain_proxy, "admin"))
    other_settings = plain_proxy.settings.model_copy(update={"data": plain_proxy.settings.data / "other"})
    with own_process(other_settings) as (url, _):
        cookies = {session.COOKIE: str(person.client.cookies.get(session.COOKIE))}
        assert httpx.get(url + "/ui/policies", cookies=cookies, trust_env=False, verify=False).status_code == 200
        assert httpx.get(url + "/ui/policies", trust_env=False, verify=False).status_code == 303


def test_each_project_sees_its_own_alone(
    sqlite_url: str, fake_vllm: FakeVllm, tmp_path: Path, start: Callable[..., RunningProxy]
) -> None:
    fake_vllm.base_names.append("acme-agent@v0")
    settings = settings_for(
        sqlite_url, fake_vllm.url, tmp_path, projects={"acme": {"policies": ["acme-agent"]}}, vllm={"max_loras": 8}
    )
    proxy = start(settings)
    people = {}
    for project in ("default", "acme"):
        people[project] = Person(proxy)
        people[project].sign_in(make_key(proxy, "admin", project=project))
    for project, own, foreign in (("default", "starter", "acme-agent"), ("acme", "acme-agent", "starter")):
        person = people[project]
        shown = person.get("/ui/policies").text
        assert own in shown and foreign not in shown
        assert person.get(f"/ui/policies/{own}").status_code == 200
        assert person.get(f"/ui/policies/{foreign}").status_code == 404
        assert person.get(f"/ui/policies/{foreign}/steps/1").status_code == 404
        answer = person.send(f"/ui/policies/{foreign}/state", state="paused")
        assert answer.status_code == 404
        person.client.close()
    assert {row.state for row in proxy.rows(schema.policies)} == {"recording"}


def test_every_page_needs_a_session(plain_proxy: RunningProxy, person: Person) -> None:
    make_key(plain_proxy, "admin")
    for path in [page.path for page in PAGES]:
        answer = person.get(re.sub(r"\{[^}]+\}", "x", path))
        assert (answer.status_code, answer.text) == (303, ""), path
