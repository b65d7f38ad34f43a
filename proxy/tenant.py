"""One project in the proxy: its policies, its threads, its routes. Nothing of it knows another project's ids.

What all projects share (vLLM's servers, the writer of records) is in `Shared`. Raw ASGI for inference in front of
FastAPI for the rest.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from proxy import admin, admin_keys, admin_privacy, admin_versions, api, passed
from proxy.asgi import Routes
from proxy.background import Background
from proxy.call import Call
from proxy.drawing import Drawing
from proxy.errors import DatabaseAway
from proxy.evaluations import Evaluating
from proxy.inference import Inference
from proxy.ledger import Ledger
from proxy.passed import Passed
from proxy.peers import Peers
from proxy.policies import Policies, Policy, live_names
from proxy.recorder import Recorder
from proxy.redaction import Redactor
from proxy.replays import Replays
from proxy.replicas import Replicas
from proxy.shadows import Shadows
from proxy.store import Store
from proxy.store_evaluations import EvaluationTables
from proxy.store_shadows import ShadowTables
from proxy.store_threads import ThreadTables
from proxy.taking import Taking
from proxy.threads import Threads
from proxy.ui import app as dashboard
from proxy.ui.page import Parts
from proxy.upstream import Answering
from proxy.wire import dialects
from proxy.wire.dialect import Server
from whetstone.ids import version_id
from whetstone.keys import Principal
from whetstone.settings import Settings

LATE_S = 0.5
"""As long as it takes until every server was looked at anyway."""
DRAW_EVERY_S = 1.0
"""From one look for shadow siblings and held-out prompts that are to be drawn to the next."""
SHADOWS_LATE = timedelta(hours=1)
"""What ended so long before the start may still get shadow siblings."""


@dataclass(frozen=True)
class Shared:
    """What all projects have in common."""

    store: Store
    recorder: Recorder
    replicas: Replicas
    upstreams: Mapping[str | None, Answering]
    """By name, vLLM's servers under None."""
    quiet_since_s: Callable[[], float | None]
    """When the last request of any app ended (monotonic seconds); None while one is served."""
    step_asked: Callable[[], None]
    """Tell the trainer that somebody asked for a step."""
    keys_changed: Callable[[], Awaitable[None]]
    """Have the keys read again; what was committed before counts when it returns."""
    charge: Callable[[Principal, int], None]
    """Count what a key's answer took, in tokens."""


class Tenant:
    """One project. `open` once what is shared is there; `read_again` again and again."""

    def __init__(self, settings: Settings, store: Store, peers: Peers) -> None:
        """`settings`: as the project has them (`Settings.of_project`)."""
        self.project = settings.project
        self.policies = Policies()
        self.threads = Threads(
            ThreadTables(store.engine, settings.project), peers, settings.groups.idle_s, settings.proxy.kept_calls
        )
        self._settings = settings
        self._reading = asyncio.Lock()
        self._waiting_since_s: float | None = None
        """Since when what was read waits until a server is seen to have it (monotonic)."""

    def open(self, shared: Shared) -> None:
        """Make the routes."""
        settings, project = self._settings, self.project
        engine, recorder, replicas = shared.store.engine, shared.recorder, shared.replicas
        self._store, self._replicas = shared.store, replicas
        self.policies = self._read_policies()
        redactor = Redactor(settings.privacy) if settings.privacy.redacts else None
        self.redactor = redactor

        def record(call: Call) -> None:
            recorder.record(call if redactor is None else redactor.calls([call])[0])

        self.inference = Inference(
            project,
            lambda: self.policies,
            shared.upstreams,
            lambda: Server(max_model_len=replicas.max_model_len),
            recorder,
            Replays(self._reply),
            self.threads,
            settings.proxy,
            shared.charge,
            redactor,
            no_train=settings.privacy.no_train,
        )
        self._passed = Passed(lambda: self.policies, shared.upstreams, settings.proxy)
        drawing = Drawing(project, replicas)
        self._shadows = Shadows(
            project,
            ShadowTables(engine, project),
            lambda: self.policies,
            drawing,
            lambda: replicas.max_model_len,
            shared.quiet_since_s,
            record,
            settings.learning,
            datetime.now(UTC) - SHADOWS_LATE,
        )
        self._evaluating = Evaluating(
            project, EvaluationTables(engine, project, shared.store.changes), lambda: self.policies, drawing, record
        )
        self.api = self._routes(shared)

    def _routes(self, shared: Shared) -> FastAPI:
        settings = self._settings
        take = Taking(shared.recorder, self.threads, self.redactor)
        ledger = Ledger(settings, shared.store.engine, shared.recorder, shared.replicas, self.read_again)
        self.dashboard = dashboard.build(
            Parts(
                settings=settings,
                policies=lambda: self.policies,
                engine=shared.store.engine,
                recorder=shared.recorder,
                ledger=ledger,
                take=take,
                step_asked=shared.step_asked,
            )
        )
        routes = api.build(
            project=self.project,
            policies=lambda: self.policies,
            store=shared.store,
            recorder=shared.recorder,
            take=take,
            judges=frozenset(settings.judges),
            settings=settings.proxy,
        )
        admin.add(
            routes,
            project=self.project,
            policies=lambda: self.policies,
            recorder=shared.recorder,
            on_step_asked=shared.step_asked,
            settings=settings.proxy,
        )
        admin_versions.add(
            routes,
            settings=settings,
            policies=lambda: self.policies,
            engine=shared.store.engine,
            ledger=ledger,
        )
        admin_keys.add(
            routes,
            project=self.project,
            engine=shared.store.engine,
            recorder=shared.recorder,
            refresh=shared.keys_changed,
            settings=settings.proxy,
        )
        admin_privacy.add(routes, project=self.project, recorder=shared.recorder)
        return routes

    def route(self, method: str, path: str) -> Routes:
        """What serves such a request. It raises a ProxyError before anything was sent, which its caller answers."""
        if method == "POST":
            if path in dialects.PATHS:
                return self.inference
            if path in passed.PATHS:
                return self._passed
        return self.api

    def start(self, background: Background) -> list["asyncio.Task[None]"]:
        """Start what runs beside the requests, until the tasks are cancelled."""
        draws = [(f"held-out prompts of {self.project}", self._evaluating.draw)]
        if self._shadows.wanted:
            draws.append((f"shadow groups of {self.project}", self._shadows.draw))
        return [background.every(DRAW_EVERY_S, name, draw) for name, draw in draws]

    async def read_again(self, *, patient: bool = False) -> None:
        """Read the policies: whatever was committed before counts from then on, also where several read at once.

        `patient`: what goes live and is not seen on a server yet counts when it is, LATE_S after it was read at most.
        Whoever has made a version loads it and promotes it at once, sooner than anybody looks at the servers again.
        """
        async with self._reading:
            policies = await asyncio.to_thread(self._read_policies)
            if list(policies) == list(self.policies):
                self._waiting_since_s = None
                return
            if patient and not self._replicas.sees(live_names(policies)):
                now_s = time.monotonic()
                self._waiting_since_s = self._waiting_since_s or now_s
                if now_s - self._waiting_since_s < LATE_S:
                    return
            self._waiting_since_s = None
            self.policies = policies
            self._replicas.changed()

    def _read_policies(self) -> Policies:
        """Those that the settings name: what else the database has, nobody here serves. No trajectory is to wait for a
        version that no server takes."""
        return Policies(
            policy.without(self._unavailable(policy))
            for policy in self._store.policies(self.project)
            if _served(policy, self._settings)
        )

    def _unavailable(self, policy: Policy) -> set[int]:
        return {
            version
            for version in policy.served_versions
            if self._replicas.nobody_takes(version_id(policy.name, version))
        }

    async def _reply(self, turn_key: str) -> bytes | None:
        try:
            return await asyncio.to_thread(self._store.reply, self.project, turn_key)
        except SQLAlchemyError as error:
            raise DatabaseAway(
                "whether this turn was answered before stands in the database: try again soon"
            ) from error


def _served(policy: Policy, settings: Settings) -> bool:
    if policy.upstream is None:
        return policy.name in settings.trained
    server = settings.upstreams.get(policy.upstream)
    return server is not None and policy.name in server.models
