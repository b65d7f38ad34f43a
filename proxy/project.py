"""Build one project in the proxy: its policies, its trajectory resolver, its routes. It never sees another project's
ids.

What all projects share (vLLM's servers, the writer of records) comes from `app`. Inference is raw ASGI; FastAPI serves
the other routes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from proxy.admission.feedback_tokens import FeedbackTokens
from proxy.api import feedback_page, responses
from proxy.api import project as api
from proxy.api.admin import keys, privacy
from proxy.api.admin import policies as admin
from proxy.api.feedback_ingest import FeedbackIngest
from proxy.api.version_moves import Ledger
from proxy.background.comparisons import Comparisons
from proxy.background.evaluations import EvaluationSampler
from proxy.background.sampler import BackgroundSampler
from proxy.background.shadow_groups import Shadows
from proxy.background.store import BackgroundTables
from proxy.dashboard import app as dashboard
from proxy.dashboard.interfaces import Parts
from proxy.domain.address import PASSED_THROUGH, RECORDED
from proxy.domain.call import Call
from proxy.domain.policies import Policies, Policy, live_names
from proxy.errors import DatabaseAway
from proxy.http.asgi import Routes
from proxy.inference.endpoint import Inference
from proxy.inference.idempotency import Replays
from proxy.inference.passthrough import PassthroughEndpoint
from proxy.inference.stored_responses import StoredResponses
from proxy.recording.recorder import Recorder
from proxy.recording.redaction import Redactor
from proxy.recording.response_store import ResponseTables
from proxy.recording.store import Store
from proxy.supervision import Background
from proxy.trajectories.peers import Peers
from proxy.trajectories.resolver import TrajectoryResolver
from proxy.trajectories.store import ThreadTables
from proxy.upstream.load_balancer import Replicas
from proxy.upstream.server import Answering
from proxy.upstream.spending import SpendingCap
from whetstone.config.settings import Settings
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import version_id

LATE_S = 0.5
"""Longest delay of new policies: by then every server has been checked anyway."""
DRAW_EVERY_S = 1.0
"""Time between two checks for shadow siblings and held-out prompts to sample."""
SHADOWS_LATE = timedelta(hours=1)
"""Attempts that ended at most this long before the start may still get shadow siblings."""


class Tenant:
    """One project. Call `start` once the proxy runs, and `read_again` periodically."""

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        recorder: Recorder,
        replicas: Replicas,
        upstreams: Mapping[str | None, Answering],
        peers: Peers,
        quiet_since_s: Callable[[], float | None],
        on_step_requested: Callable[[], None],
        keys_changed: Callable[[], Awaitable[None]],
        charge: Callable[[Principal, int], None],
        tokens: FeedbackTokens,
        spending: SpendingCap,
    ) -> None:
        """Build the project. `settings`: its own settings (`Settings.of_project`). All projects share the rest.

        - `upstreams`: by name, with vLLM's servers under None.
        - `quiet_since_s`: return when the last request of any app ended (monotonic seconds); None while one is served.
        - `on_step_requested`: notify the trainer that a step was requested.
        - `keys_changed`: read the keys again; every change that was committed before is in force when it returns.
        - `charge`: count the tokens of an answer against the limits of its key.
        - `tokens`: signs the feedback tokens of all projects.
        - `spending`: the cap of all projects on what other servers cost.
        """
        project = self.project = settings.project
        self._settings = settings
        self._store, self._replicas = store, replicas
        self._reading = asyncio.Lock()
        self._waiting_since_s: float | None = None
        """Since when new policies have waited for a server that has their version (monotonic)."""
        self.policies = self._read_policies()
        policies: Callable[[], Policies] = partial(getattr, self, "policies")  # a function would be a step of each call
        self.threads = TrajectoryResolver(
            ThreadTables(store.engine, project), peers, settings.groups.idle_s, settings.proxy.kept_calls
        )
        redactor = self.redactor = Redactor(settings.privacy) if settings.privacy.redacts else None

        def record(call: Call) -> None:
            recorder.record(call if redactor is None else redactor.calls([call])[0])

        stored = StoredResponses(ResponseTables(store.engine, project), recorder, peers)
        self.inference = Inference(
            project,
            policies,
            upstreams,
            replicas,
            recorder,
            Replays(self._reply),
            self.threads,
            settings.proxy,
            charge,
            stored,
            spending,
            redactor,
            no_train=settings.privacy.no_train,
            explore={policy: one.explore for policy, one in settings.learning.items()},
            sign_feedback=partial(tokens.sign, project) if settings.proxy.feedback_tokens else None,
        )
        passthrough = PassthroughEndpoint(policies, upstreams, settings.proxy, partial(spending.check, project))
        self.posts: dict[str, Routes] = dict.fromkeys(RECORDED, self.inference) | dict.fromkeys(
            PASSED_THROUGH, passthrough
        )
        """The paths of POST that `api` does not serve. All of these raise a ProxyError only before anything was sent;
        the caller answers it."""
        tables = BackgroundTables(store.engine, project, store.changes)
        drawing = BackgroundSampler(project, replicas, record)
        self._shadows = Shadows(
            tables,
            policies,
            drawing,
            replicas.max_model_len,
            quiet_since_s,
            settings.learning,
            datetime.now(UTC) - SHADOWS_LATE,
        )
        self._evaluating = EvaluationSampler(tables, policies, drawing)
        take = FeedbackIngest(recorder, self.threads, redactor, partial(store.targets, project))
        ledger = Ledger(settings, store.engine, recorder, replicas, self.read_again)
        self.comparisons = Comparisons(self.inference)
        self.dashboard = dashboard.build(
            Parts(
                settings=settings,
                policies=policies,
                engine=store.engine,
                recorder=recorder,
                ledger=ledger,
                take=take,
                on_step_requested=on_step_requested,
                written_until=lambda: peers.written_until,
                comparisons=self.comparisons,
                spending=spending,
            )
        )
        self.api = api.build(
            project=project,
            policies=policies,
            store=store,
            recorder=recorder,
            take=take,
            judges=frozenset(settings.judges),
            settings=settings.proxy,
        )
        feedback_page.add(self.api, project=project, tokens=tokens, settings=settings.proxy)
        responses.add(self.api, stored)
        admin.add(
            self.api,
            settings=settings,
            policies=policies,
            engine=store.engine,
            recorder=recorder,
            ledger=ledger,
            on_step_requested=on_step_requested,
        )
        keys.add(
            self.api,
            project=project,
            engine=store.engine,
            recorder=recorder,
            refresh=keys_changed,
            settings=settings.proxy,
        )
        privacy.add(self.api, project=project, recorder=recorder)

    def start(self, background: Background) -> list["asyncio.Task[None]"]:
        """Start the background tasks; they run until they are cancelled."""
        draws = [(f"held-out prompts of {self.project}", self._evaluating.draw)]
        if self._shadows.wanted:
            draws.append((f"shadow groups of {self.project}", self._shadows.draw))
        return [background.every(DRAW_EVERY_S, name, draw) for name, draw in draws]

    async def read_again(self, *, patient: bool = False) -> None:
        """Read the policies. Every change that was committed before is in force when it returns, even with concurrent
        readers.

        `patient`: if no server is known to have a version that goes live, wait with the new policies until one has it,
        at most LATE_S after they were first read. A new version may be loaded and promoted before the next check of the
        servers.
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
        """Return the project's policies that are in the settings; this proxy does not serve others in the database.
        Leave out versions that no server can load, so that no trajectory waits for one."""
        return Policies(
            policy.without(
                {
                    version
                    for version in policy.served_versions
                    if self._replicas.failed_everywhere(version_id(policy.name, version))
                }
            )
            for policy in self._store.policies(self.project)
            if _served(policy, self._settings)
        )

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
