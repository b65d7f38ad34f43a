"""A real Chromium before a real proxy with a filled database. Needs Debian's `chromium`; see `make test-system`."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from tests.unit.proxy.conftest import BASE_NAMES, FakeVllm, RunningProxy, settings_for
from tests.unit.proxy.ui_scene import Scene, compare, fill
from tests.unit.proxy.ui_story import Story
from whetstone.domain.api_keys import KeyScope, hash_of, new_key
from whetstone.registry import api_key_store

if TYPE_CHECKING:  # the environment of the other tests has no Playwright
    from playwright.sync_api import Browser, BrowserContext, Page

WAITS_MS = 15_000
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import sync_playwright

    browser_path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser_path is None:
        pytest.fail("these tests did not run: no Chromium here; `apt-get install chromium` brings one", pytrace=False)
    # A container has no sandbox of its own to give.
    sandbox = [] if os.geteuid() else ["--no-sandbox"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=sandbox)
        yield browser
        browser.close()


@dataclass
class Looking:
    """A page in a browser, and all that was wrong in it."""

    page: "Page"
    url: str
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAITS_MS)
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        self.page.on("request", lambda request: self._stays_here(request.url))

    def go(self, path: str) -> "Page":
        answer = self.page.goto(self.url + path)
        assert answer is not None and answer.status == 200, f"{path}: {answer and answer.status}"
        return self.page

    def settled(self) -> None:
        """Return when the page is loaded and its charts are drawn."""
        self.page.wait_for_load_state("load")
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('[data-chart]')].every((one) => one.querySelector('canvas'))"
        )

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.wrong.append(f"{kind}: {text}")

    def _stays_here(self, url: str) -> None:
        if not url.startswith((self.url, "data:")):
            self.wrong.append(f"asks elsewhere: {url}")


Look = Callable[..., Looking]


def opened_by(browser: "Browser", url: str, opened: "list[tuple[BrowserContext, Looking]]") -> Look:
    def look(**values: Any) -> Looking:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | values))
        looking = Looking(context.new_page(), url)
        opened.append((context, looking))
        return looking

    return look


@pytest.fixture
def opened() -> "Iterator[list[tuple[BrowserContext, Looking]]]":
    """The pages of a test; whatever was wrong in any of them fails it."""
    opened: list[tuple[BrowserContext, Looking]] = []
    yield opened
    for context, _ in opened:
        context.close()
    assert [looking.wrong for _, looking in opened if looking.wrong] == []


def running(sqlite_template: Path, data: Path) -> tuple[RunningProxy, FakeVllm]:
    shutil.copyfile(sqlite_template, data / "whetstone.db")
    fake = FakeVllm(base_names=(*BASE_NAMES, "agent@v0"))
    database_url = f"sqlite:///{data / 'whetstone.db'}"
    settings = settings_for(database_url, fake.url, data, vllm={"max_loras": 8}, policies=("agent",))
    return RunningProxy(settings), fake


@pytest.fixture(scope="session")
def filled(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """A proxy on loopback without keys: a policy that has learned, and conversations of every kind."""
    proxy, fake = running(sqlite_template, tmp_path_factory.mktemp("filled"))
    now = datetime.now(UTC)
    scene = Scene(proxy.engine, now - timedelta(minutes=5))
    fill(scene)
    compare(scene)
    Story(proxy.engine, now, policy="agent").tell()
    before = Story(proxy.engine, now - timedelta(days=2), policy="agent")
    for version, won in ((0, 20), (12, 10), (24, 40)):
        before.played(version, [int(game < won) for game in range(20 if version == 12 else 60)])
    yield proxy
    proxy.stop()
    fake.close()


@pytest.fixture
def look(browser: "Browser", filled: RunningProxy, opened: "list[tuple[BrowserContext, Looking]]") -> Look:
    """Opens a fresh browser window on the filled dashboard."""
    return opened_by(browser, filled.url, opened)


@pytest.fixture
def own(sqlite_template: Path, tmp_path: Path) -> Iterator[RunningProxy]:
    """A proxy of the test's own, whose policy `agent` has learned a little."""
    proxy, fake = running(sqlite_template, tmp_path)
    Story(proxy.engine, datetime.now(UTC), policy="agent").tell(6, 4)
    yield proxy
    proxy.stop()
    fake.close()


@pytest.fixture
def look_at_own(browser: "Browser", own: RunningProxy, opened: "list[tuple[BrowserContext, Looking]]") -> Look:
    """Opens a fresh browser window on it."""
    return opened_by(browser, own.url, opened)


def make_key(engine: Engine, *scopes: KeyScope) -> str:
    """A key that opens the proxy as soon as that has read it."""
    key_id, key = new_key()
    with engine.begin() as connection:
        made = api_key_store.KeyRecord("default", "a person's", list(scopes), datetime.now(UTC))
        api_key_store.create(connection, made, key_id, hash_of(key.encode()))
    return key
