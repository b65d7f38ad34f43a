"""A group that this process has leased while judges rank it: its lease, what judges get of it, and its verdict.

The verdict is stored if the group has not changed since it was read. Its scores are applied like all other feedback.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine

from judge.decisions.lifecycle import FUNCTIONS_FIRST
from judge.decisions.model import Rules
from judge.decisions.reward_parts import vetoed
from judge.errors import JudgeError
from judge.ruler.aggregate import Verdict
from judge.ruler.conversation import conversation
from judge.ruler.prompt import DEFAULT_RUBRIC
from judge.ruler.ranking_input import RankingInput, material
from judge.settlement.sweep import apply
from judge.store import ruler as store_ruler
from judge.store import unit_of_work
from whetstone.config.rewards import RewardSettings, RulerSettings
from whetstone.domain.sampling_share import in_share

SOON_S = 2.0
"""When to look again for what is about to finish."""
LOOK_AGAIN_S = 600.0
"""When to look again for what only people can repair."""
NOTHING_TO_RANK = "none of its attempts can be ranked"

P = ParamSpec("P")
Result = TypeVar("Result")


class LeaseLost(JudgeError):
    """Another worker has the group, or it does not have to be ranked any more."""


class Waits(JudgeError):
    """The group cannot be ranked before this many seconds have passed; the message gives the reason."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


@dataclass(frozen=True)
class Tables:
    """Runs transactions off the event loop."""

    engine: Engine
    now: Callable[[], datetime]

    async def write(
        self, work: Callable[Concatenate[Connection, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Run `work` in one transaction."""
        return await asyncio.to_thread(_run, self.engine, lambda connection: work(connection, *args, **kwargs))

    async def read(
        self, work: Callable[Concatenate[Connection, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Run `work` for reading, without a transaction."""
        reader = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        return await asyncio.to_thread(_run, reader, lambda connection: work(connection, *args, **kwargs))


def _run(engine: Engine, work: Callable[[Connection], Result]) -> Result:
    with engine.begin() as connection:
        return work(connection)


class GroupLease:
    """The lease of a group; each call to a judge extends it."""

    def __init__(self, tables: Tables, group: store_ruler.LeasedGroup) -> None:
        self.tables, self.group = tables, group

    async def extend(self, seconds: float, waits: str | None = None) -> None:
        """Extend the lease to `seconds` from now. `waits`: why the group is not ranked yet.

        Raises:
            LeaseLost: the lease is over.
        """
        until = self.tables.now() + timedelta(seconds=seconds)
        if not await self.tables.write(store_ruler.hold, self.group, until, waits):
            raise LeaseLost(self.group.id)
        self.group = replace(self.group, until=until)


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """What was read of a group."""

    group: store_ruler.LeasedGroup
    request: store_ruler.RankingRequest | None
    """The feedback that requests the ranking; None: the settings require it."""
    members: tuple[tuple[Any, ...], ...] | None
    """The state of its trajectories; None: it is not compared."""
    about: RankingInput | None
    """What has to be ranked; None: nothing."""


def read_group(
    connection: Connection,
    group: store_ruler.LeasedGroup,
    request: store_ruler.RankingRequest | None,
    learning: RewardSettings,
) -> GroupSnapshot:
    """Read everything that judges get of a group.

    Attempts that broke off with the reward of a failure, or were vetoed, are left out: a rule has decided on them.

    Raises:
        Waits: reward functions have not run, or the rubric cannot be read.
    """
    members = store_ruler.members(connection, group)
    if any(member.code_due_at is not None for member in members):
        raise Waits(FUNCTIONS_FIRST, SOON_S)
    failed = {one.id for one in members if one.reward_source == "failure" and one.broken_off}
    ranked = [one for one in members if one.id not in failed and not vetoed(one.code_parts or {}, learning)]
    conversations = [
        conversation(one.id, store_ruler.turns(connection, group.project, one.id), by_turn=learning.ruler.by_turn)
        for one in ranked
    ]
    about = None
    if any(one.lines for one in conversations):
        task = next((one.task for one in ranked if one.task is not None), None)
        rubric = (request.rubric if request is not None else None) or _rubric(learning.ruler, task)
        about = material(group.id, conversations, rubric, learning.ruler)
    return GroupSnapshot(group, request, tuple(one.facts for one in members), about)


def conclude(
    connection: Connection,
    case: GroupSnapshot,
    group: store_ruler.LeasedGroup,
    ranking: Verdict | None,
    ruler: RulerSettings,
    now: datetime,
    rules: Rules,
) -> bool | None:
    """Store the scores as feedback on the group, and apply it in the same transaction.

    `group`: with its present lease. Return False if the group has changed since it was read and must be read again.
    Return None if another worker has it, or it does not have to be ranked any more.
    """
    requested_at = store_ruler.lock(connection, group)
    if requested_at is False:
        return None
    members = tuple(one.facts for one in store_ruler.members(connection, group))
    if requested_at != case.group.requested_at or case.members not in (None, members):
        return False
    rewards: dict[str, float] = {}
    if case.about is not None and ranking is not None:
        each = zip(case.about.trajectories, ranking.scores_G, strict=True)
        rewards = {trajectory_id: score for ids, score in each for trajectory_id in ids}
    feedback = _feedback(group, case.request, rewards, now)
    stands = feedback is not None and store_ruler.write_scores(connection, group.project, feedback)
    if case.request is not None and not stands:
        return False  # withdrawn meanwhile: another request may still be valid
    reviewed = {one for one in rewards if in_share(f"review {one}", ruler.review_share)}
    store_ruler.judged(connection, group, ranking.noise if ranking is not None else None, reviewed, now)
    if feedback is not None and stands:
        store_ruler.supersede_requests(connection, group, feedback)
        if rewards:
            apply(connection, unit_of_work.feedback_of(connection, group.project, feedback["id"]), now, rules)
    return True


def own_id(group_id: str) -> str:
    """Return the id of the feedback that ranks a group without a request: the same for every ranking of the group."""
    return hashlib.blake2b(f"judge {group_id}".encode(), digest_size=16).hexdigest()


def _rubric(ruler: RulerSettings, task: str | None) -> str:
    path: Path | None = ruler.rubrics.get(task, ruler.rubric) if task is not None else ruler.rubric
    if path is None:
        return DEFAULT_RUBRIC
    try:
        # PostgreSQL stores no NUL in a text.
        text = path.read_text(encoding="utf-8").replace("\x00", "\ufffd").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Waits(f"the rubric {path} cannot be read: {error}", LOOK_AGAIN_S) from error
    if not text:
        raise Waits(f"the rubric {path} is empty", LOOK_AGAIN_S)
    return text


def _feedback(
    group: store_ruler.LeasedGroup,
    request: store_ruler.RankingRequest | None,
    rewards: Mapping[str, float],
    now: datetime,
) -> dict[str, Any] | None:
    """Return the scores as a row of table `feedback`: the one that requested them, else one of ours."""
    if request is None and not rewards:
        return None
    return {
        "id": request.id if request is not None else own_id(group.id),
        "target_kind": "group",
        "target_id": group.id,
        "choice": 0,
        "rewards": dict(rewards) or None,
        "source": "judge",
        "final": True,
        "judge": {"kind": "ruler"},
        "state": "waiting" if rewards else "unused",
        "reason": None if rewards else NOTHING_TO_RANK,
        "created_at": request.created_at if request is not None else now,
        "due_at": None,
    }
