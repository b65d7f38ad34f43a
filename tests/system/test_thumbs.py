"""feedback.js in a page of another origin: a thumb arrives, and nothing but the token's own completion can be rated."""

import html
import shutil
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from migrations import schema
from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.admission.token_secrets import read_secrets
from tests.system.conftest import WAITS_MS, make_key
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, settings_for, wait_for

if TYPE_CHECKING:  # the environment of the other tests has no Playwright
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.system

HOSTILE = "\"'><img src=x onerror=window.pwned=1><script>window.pwned=1</script>"
PAGE = """<!doctype html><html lang="en"><title>App</title>
<script src="{proxy}/feedback.js" defer></script>
<main><h1>App</h1><p>Your parcel is in Rotterdam.</p><whetstone-thumbs {attributes}></whetstone-thumbs></main></html>"""
POST = """async ([url, token, body]) => {
  const answer = await fetch(url + '/v1/feedback', {
    method: 'POST', headers: { 'Content-Type': 'application/json', 'X-Feedback-Token': token },
    body: JSON.stringify(body) });
  return [answer.status, (await answer.json()).error?.code ?? null];
}"""


class AppPages(ThreadingHTTPServer):
    """The app's own web server: one page, whatever the path."""

    def __init__(self) -> None:
        self.page = ""
        super().__init__(("127.0.0.1", 0), AppPage)
        threading.Thread(target=self.serve_forever).start()

    @property
    def origin(self) -> str:
        return f"http://localhost:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class AppPage(BaseHTTPRequestHandler):
    server: AppPages

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page.encode() if self.path == "/" else b"")

    def log_message(self, *_: Any) -> None:
        pass


class Site:
    """The app: a proxy with keys, its server's key, its page in a browser."""

    def __init__(self, proxy: RunningProxy, pages: AppPages, page: "Page") -> None:
        self.proxy, self.pages, self.page = proxy, pages, page
        self.key = make_key(proxy.engine, "inference", "feedback")
        self.headers = {"Authorization": f"Bearer {self.key}"}
        wait_for(lambda: proxy.client.get("/v1/models").status_code == 401)
        wait_for(lambda: proxy.client.get("/v1/models", headers=self.headers).status_code == 200)

    def answer(self) -> tuple[str, str]:
        """An answer's id and token."""
        headers = self.proxy.chat(self.headers).headers
        return headers["x-completion-id"], headers["x-feedback-token"]

    def show(self, **attributes: str) -> "Page":
        """The page, with these attributes on its thumbs."""
        written = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
        self.pages.page = PAGE.format(proxy=self.proxy.url, attributes=written)
        self.page.goto(self.pages.origin + "/")
        self.page.wait_for_function("() => document.querySelector('whetstone-thumbs button')")
        return self.page

    def feedback(self) -> list[Any]:
        return self.proxy.rows(schema.feedback)


@pytest.fixture
def site(browser: "Browser", sqlite_template: Path, tmp_path: Path) -> Iterator[Site]:
    shutil.copyfile(sqlite_template, tmp_path / "whetstone.db")
    fake, pages = FakeVllm(), AppPages()
    proxy_settings = {"cors_origins": [pages.origin], "feedback_tokens": True, "max_wait_s": 0.2}
    url = f"sqlite:///{tmp_path / 'whetstone.db'}"
    proxy = RunningProxy(settings_for(url, fake.url, tmp_path, proxy=proxy_settings))
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAITS_MS)
    yield Site(proxy, pages, page)
    context.close()
    proxy.stop()
    pages.close()
    fake.close()


def test_a_thumb_and_a_comment_arrive_from_another_origin(site: Site) -> None:
    completion_id, token = site.answer()
    page = site.show(token=token)
    page.get_by_role("button", name="Bad answer").click()
    page.get_by_role("status").filter(has_text="Thank you.").wait_for()
    assert page.get_by_role("button", name="Bad answer").get_attribute("aria-pressed") == "true"
    (row,) = site.feedback()
    assert (row.target_id, row.reward, row.source, row.comment) == (completion_id, 0.0, "thumbs", None)
    page.get_by_role("textbox").fill(HOSTILE)
    page.get_by_role("button", name="Send").click()
    page.get_by_role("textbox").wait_for(state="hidden")
    assert [row.comment for row in site.feedback()] == [None, HOSTILE]


def test_the_keyboard_is_enough(site: Site) -> None:
    page = site.show(token=site.answer()[1])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Thank you.").wait_for()
    page.get_by_role("textbox").focus()
    page.keyboard.type("to the point")
    page.keyboard.press("Enter")
    page.get_by_role("textbox").wait_for(state="hidden")
    assert [(row.reward, row.comment) for row in site.feedback()] == [(1.0, None), (1.0, "to the point")]


def test_another_answers_token_resets_the_thumbs(site: Site) -> None:
    page = site.show(token=site.answer()[1])
    page.get_by_role("button", name="Good answer").click()
    page.get_by_role("textbox").wait_for()
    other_id, other = site.answer()
    page.locator("whetstone-thumbs").evaluate("(one, token) => one.setAttribute('token', token)", other)
    assert page.get_by_role("button", name="Good answer").get_attribute("aria-pressed") == "false"
    page.get_by_role("button", name="Good answer").click()
    page.get_by_role("textbox").wait_for()
    assert site.feedback()[-1].target_id == other_id


def test_another_completion_an_expired_token_and_a_key_are_refused(site: Site) -> None:
    (first, token), (other, _) = site.answer(), site.answer()
    page = site.show(token=token)
    secrets, now_s = read_secrets(site.proxy.settings.data, {}), int(datetime.now(UTC).timestamp())
    key_id = site.key.split("_")[1]
    expired = FeedbackTokens(secrets, 60).sign("default", key_id, first, expires_at_s=now_s - 1)
    thumb = {"thumbs": "up"}
    for sent, body, answered in (
        (token, thumb | {"completion_id": other}, [403, "not_for_feedback_token"]),
        (token, {"reward": 1}, [403, "not_for_feedback_token"]),
        (expired, thumb, [401, "feedback_token_expired"]),
        (site.key, thumb, [401, "invalid_feedback_token"]),
        (site.key, thumb | {"completion_id": first}, [401, "invalid_feedback_token"]),
    ):
        assert page.evaluate(POST, [site.proxy.url, sent, body]) == answered
    assert site.feedback() == []


def test_the_script_tells_the_user_of_a_refusal_and_never_sends_a_key(site: Site) -> None:
    page = site.show(token=site.answer()[1][:-4] + "AAAA")
    page.get_by_role("button", name="Good answer").click()
    page.get_by_role("status").filter(has_text="This could not be sent.").wait_for()
    assert page.get_by_role("button", name="Good answer").get_attribute("aria-pressed") == "false"
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.locator("whetstone-thumbs").evaluate("(one, key) => one.setAttribute('token', key)", site.key)
    page.get_by_role("button", name="Good answer").click()
    page.get_by_role("status").filter(has_text="This could not be sent.").wait_for()
    assert (requests, site.feedback()) == ([], [])


def test_hostile_texts_stay_texts(site: Site) -> None:
    texts = dict.fromkeys(("up", "down", "comment", "send", "sent", "failed"), HOSTILE)
    page = site.show(token=site.answer()[1], **texts)
    page.locator("whetstone-thumbs button").first.click()
    page.get_by_role("status").filter(has_text="window.pwned").wait_for()
    assert page.evaluate("() => window.pwned") is None
    assert page.locator("whetstone-thumbs img, whetstone-thumbs script").count() == 0
