"""Define what a page and an action of the dashboard consist of. Values only."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine

from proxy.api.version_moves import Ledger
from proxy.background.comparisons import Comparisons
from proxy.domain.feedback_rows import FeedbackResult
from proxy.domain.policies import Policies
from proxy.recording.recorder import Recorder
from proxy.upstream.spending import SpendingCap
from whetstone.config.settings import Settings

Take = Callable[[list[dict[str, Any]], str | None], Awaitable[list[FeedbackResult]]]


@dataclass(frozen=True)
class Parts:
    """What the pages and actions of one project use."""

    settings: Settings
    """The project's own settings."""
    policies: Callable[[], Policies]
    engine: Engine
    recorder: Recorder
    ledger: Ledger
    take: Take
    """Store rows of feedback as `POST /v1/feedback` does: redacted, committed or journalled."""
    on_step_requested: Callable[[], None]
    """Notify the trainer that a step was requested."""
    written_until: Callable[[], float]
    """Return the time (seconds since the epoch) before which all finished calls are in the tables."""
    comparisons: Comparisons
    spending: SpendingCap
    """The cap of all projects on what other servers cost, and what was spent today."""


@dataclass(frozen=True)
class Visitor:
    """The visitor of the dashboard."""

    project: str
    key_id: str | None
    """None if the proxy needs no keys, or the visitor has not signed in yet."""
    csrf: str
    """The token that each of the visitor's forms must send back."""
    signed_in: bool
    """Whether the visitor signed in with a key, so that a sign-out is possible."""
    may_look: bool = True
    """Whether the visitor may see more than the sign-in page."""
    rater: str = "local"
    """Name under which the visitor rates attempts: the one that this browser chose, else the name of the key."""


@dataclass(frozen=True)
class _Request:
    """What the request of a page and a submitted form have in common."""

    path: Mapping[str, str]
    """Values of the placeholders in the path."""
    visitor: Visitor
    parts: Parts
    now: datetime

    @property
    def project(self) -> str:
        """Return the project that the visitor sees."""
        return self.parts.settings.project


@dataclass(frozen=True)
class PageRequest(_Request):
    """The request of a page. `connection` is for reading; it is open while the page's values are loaded."""

    connection: Connection
    query: Mapping[str, str]


@dataclass(frozen=True)
class FormRequest(_Request):
    """A submitted form, its CSRF token checked."""

    form: Mapping[str, str]
    """The last value of each field."""


@dataclass(frozen=True)
class Page:
    """One address, its template, and the function that loads the template's values; it runs in a thread."""

    path: str
    template: str
    load: Callable[[PageRequest], Mapping[str, Any]]

    @property
    def nav(self) -> str:
        """Return the path of the page in the navigation that this page belongs to: `/ui/groups`."""
        return "/".join(self.path.split("/")[:3])


@dataclass(frozen=True)
class ActionResult:
    """Result of an action. `message` is shown on the next page, which is `to`, else the form's field `page`, else
    the action's `back`."""

    message: str
    to: str | None = None
    rater: str | None = None
    """The name under which this browser rates from now on; None: it stays."""
    reward: float | None = None
    """The reward that the rated attempt will have; a script shows it on the attempt's card."""


@dataclass(frozen=True)
class Action:
    """The address of a form. Errors of `act` (`ProxyError`) are shown on the form's page: its field `page`, else
    `back`, a path with the same placeholders."""

    path: str
    act: Callable[[FormRequest], Awaitable[ActionResult]]
    back: str
