"""What a page and an action of the dashboard are made of. Values only; knows no template, no query."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine

from proxy.ledger import Ledger
from proxy.policies import Policies
from proxy.recorder import Recorder
from whetstone.settings import Settings

Take = Callable[[list[dict[str, Any]], str | None], Awaitable[list[str]]]


@dataclass(frozen=True)
class Parts:
    """What pages and actions of one project reach."""

    settings: Settings
    """As the project has them."""
    policies: Callable[[], Policies]
    engine: Engine
    recorder: Recorder
    ledger: Ledger
    take: Take
    """Take rows of feedback as `POST /v1/feedback` does: redacted, committed or journaled; their ids."""
    step_asked: Callable[[], None]
    """Tell the trainer that somebody asked for a step."""


@dataclass(frozen=True)
class Visitor:
    """Who looks at the dashboard."""

    project: str
    key_id: str | None
    """None where the proxy asks for no keys, or nobody has signed in yet."""
    csrf: str
    """What each of the visitor's forms has to bring back."""
    signed_in: bool
    """By a key, so that there is something to sign out of."""
    may_look: bool = True
    """Not only at the sign-in page."""


@dataclass(frozen=True)
class Asked:
    """What a page is made for. `connection` reads; it is open while the page's values are loaded."""

    project: str
    connection: Connection
    path: Mapping[str, str]
    """What stood in the holes of the page's path."""
    query: Mapping[str, str]
    visitor: Visitor
    parts: Parts
    now: datetime


@dataclass(frozen=True)
class Page:
    """One address, its template, and what loads the template's values; that runs in a thread."""

    path: str
    template: str
    load: Callable[[Asked], Mapping[str, Any]]
    nav: str | None = None
    """The path of the page in the navigation that this one is of."""


@dataclass(frozen=True)
class Acting:
    """A form that was sent, its CSRF token checked."""

    project: str
    path: Mapping[str, str]
    form: Mapping[str, str]
    """The last value of each field."""
    fields: Sequence[tuple[str, str]]
    """All of them, in order."""
    visitor: Visitor
    parts: Parts
    now: datetime


@dataclass(frozen=True)
class Done:
    """What an action has come to: said on the next page, which is `to`, else the action's `back`."""

    said: str
    to: str | None = None


@dataclass(frozen=True)
class Action:
    """A form's address. What goes wrong in `act` (`ProxyError`) is said on `back`, a path with the same holes."""

    path: str
    act: Callable[[Acting], Awaitable[Done]]
    back: str
