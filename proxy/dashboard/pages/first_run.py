"""The part of the home page that leads from an empty database to the first step."""

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from proxy.dashboard.interfaces import PageRequest
from proxy.dashboard.queries import counts, first_run, policies
from proxy.dashboard.views.first_run import Facts, Milestone, current, milestones
from proxy.dashboard.views.funnel import funnel
from whetstone.config.settings import STARTER
from whetstone.doctor import training, training_store

FOLDED_FROM = 1_000
"""From this many recorded attempts on the part is folded: it is known by then."""


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What the template shows."""

    policy: str
    state: str
    newest: dict[str, Any] | None
    """The newest call; None before the first one."""
    attempts: int
    milestones: list[Milestone]
    current: int
    """Place of the milestone that comes next."""
    is_folded: bool
    is_starter: bool
    """Whether its base model is the starter, which can do little."""


def load(request: PageRequest) -> FirstRun | None:
    """Load what is missing until the first step of the policy with most calls; None if the project has taken a step, or
    has no policy that can train."""
    connection, project = request.connection, request.project
    if first_run.has_step(connection, project):
        return None
    settings = request.parts.settings
    served = {one.name for one in request.parts.policies()}
    rows = {row["name"]: row for row in policies.policies(connection, project) if row["upstream"] is None}
    names = sorted(served & rows.keys())
    if not names:
        return None
    all_counts = counts.reasons(connection, project, names, None)
    totals = Counter[str]()
    for policy, _, _, number in all_counts:
        totals[policy] += number
    # Of equal policies the one that apps ask for by default.
    name = max(names, key=lambda name: (totals[name], name == settings.policy))
    state, attempts = rows[name]["state"], totals[name]
    ready, why_not = None, None
    if state == "training":
        since = request.now - timedelta(days=training.DAYS)
        (row,) = training_store.policies(connection, project, since, name)
        scored = training_store.scored(connection, project, name)
        launch = training_store.last_launch(connection, settings.home) if settings.launcher.command else None
        stack = training.Stack(runs=True, trainer_alive=None, url=None, launch=launch)
        ready = scored.worth(settings.trainer)
        why_not = training.why_not(row, scored, bool(attempts), settings.trainer, stack, request.now)
    steps = milestones(
        Facts(
            policy=name,
            state=state,
            stages=funnel((is_in, why, number) for policy, is_in, why, number in all_counts if policy == name),
            groups=first_run.groups_of_several(connection, project, name),
            has_baseline=settings.learning_of(name).baseline,
            ready=ready,
            groups_per_step=settings.trainer.groups_per_step,
            why_not=why_not,
        )
    )
    newest = first_run.newest_call(connection, project) if attempts else None
    return FirstRun(
        name,
        state,
        newest,
        attempts,
        steps,
        current(steps),
        is_folded=attempts >= FOLDED_FROM,
        is_starter=settings.model == str(STARTER),
    )
