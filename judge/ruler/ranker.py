"""Rank the groups that are due for judges: read a group, get its judgements, store the verdict.

A group is leased; each of its judgements is requested separately and stored at once, so a worker that dies loses only
the calls in flight. A group is ranked when all its judgements exist. Until then it waits, with a stored reason.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, OperationalError

from judge.decisions.apply_feedback import NO_JUDGE
from judge.ruler import plan
from judge.ruler import snapshot as cases
from judge.ruler.aggregate import Verdict, verdict
from judge.ruler.judge_pool import Judges, Pause
from judge.ruler.judgement import MARGIN_S, JudgementTask
from judge.ruler.lease import GroupLease, LeaseLost, Tables, Waits
from judge.ruler.llm import close, load
from judge.ruler.plan import PlannedJudgement
from judge.ruler.ranking_input import RankingInput
from judge.ruler.snapshot import LOOK_AGAIN_S, GroupSnapshot
from judge.settlement.sweep import rules_of
from judge.store import ruler as store_ruler
from judge.store.ruler import Judgement, LeasedGroup, RankingRequest
from whetstone.config.rewards import JudgeSettings, RulerSettings
from whetstone.config.settings import Settings
from whetstone.observability import log_setup, tracing

log = logging.getLogger(__name__)


async def rank_due(
    engine: Engine,
    settings: Settings,
    clock: Callable[[], datetime] | None = None,
    paused: dict[str, Pause] | None = None,
) -> int:
    """Rank groups until none is due; return the number of groups taken.

    It ranks as many at a time as the judges allow (`judges.<name>.concurrency`). `paused`: judges that were
    down or busy in an earlier pass; this one adds to it.

    Raises:
        sqlalchemy.exc.OperationalError, InterfaceError: the database is unreachable. What was stored stays.
    """
    # Else the first group would be leased for as long as litellm takes to load.
    await asyncio.to_thread(load)
    tables = Tables(engine, clock or (lambda: datetime.now(UTC)))
    known = {name: reached(judge, settings) for name, judge in settings.judges.items()}
    judges = Judges(known, {} if paused is None else paused)
    ranker = Ranker(tables, judges, settings)
    now = tables.now()
    await tables.write(lambda connection: store_ruler.forget_over(connection, now))
    at_once = max((judge.concurrency for judge in judges.settings.values()), default=1)
    workers = [asyncio.ensure_future(ranker.work()) for _ in range(at_once)]
    try:
        return sum(await asyncio.gather(*workers))
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await close()


def reached(judge: JudgeSettings, settings: Settings) -> JudgeSettings:
    """Return the judge; for `base` with the address of vLLM's base model, called directly, not through the proxy."""
    if judge.model != "base":
        return judge
    url = f"{settings.vllm.urls[0]}/v1" if judge.url is None else judge.url
    return judge.model_copy(update={"model": f"openai/{settings.served_name}", "url": url})


class Ranker:
    """One pass over the due groups."""

    def __init__(self, tables: Tables, judges: Judges, settings: Settings) -> None:
        self._tables, self._judges, self._settings = tables, judges, settings
        self._rules = rules_of(settings.groups, settings.learning, settings.judges)

    async def work(self) -> int:
        """Take one group after the other until none is due; return their number."""
        done = 0
        while True:
            group = await self._take()
            if group is None:
                return done
            done += 1
            lease = GroupLease(self._tables, group)
            attributes = {tracing.PROJECT: group.project, tracing.GROUP: group.id}
            with (
                log_setup.about(project=group.project, group=group.id, policy=group.policy),
                tracing.span("rank group", attributes),
            ):
                try:
                    await self._look(lease)
                except LeaseLost:
                    log.info("no longer to be ranked here")

    async def _take(self) -> LeasedGroup | None:
        now = self._tables.now()
        until = now + timedelta(seconds=MARGIN_S)
        return await self._tables.write(lambda connection: store_ruler.take(connection, now, until))

    async def _look(self, lease: GroupLease) -> None:
        try:
            await self._rank(lease)
        except Waits as waits:
            # The reason may quote a provider, and with it the prompt.
            log.info("not ranked yet, looked at again in %.0f s: judge_waits in its row says why", waits.seconds)
            await lease.extend(waits.seconds, str(waits))
        except (LeaseLost, OperationalError, InterfaceError):
            raise
        except Exception as error:
            # One group that cannot be ranked must not block the others.
            log.exception("it cannot be ranked")
            await lease.extend(LOOK_AGAIN_S, f"a fault of Whetstone's, see judge.log: {type(error).__name__}")

    async def _rank(self, lease: GroupLease) -> None:
        group, now = lease.group, self._tables.now()
        learning = self._settings.learning_of(group.policy)
        request = await self._tables.read(lambda connection: store_ruler.ranking_request(connection, group))
        if group.requested_at is not None and request is None:
            await self._tables.write(lambda connection: store_ruler.decide_again(connection, group, now))
            return
        own_id = cases.own_id(group.id)
        if request is None and await self._tables.read(
            lambda connection: store_ruler.is_withdrawn(connection, group.project, own_id)
        ):
            await self._conclude(lease, GroupSnapshot(group, None, None, None), None, learning.ruler)
            return
        judges = self._those(request, learning.ruler)
        case = await self._tables.read(lambda connection: cases.read(connection, group, request, learning))
        if case.about is None:
            await self._conclude(lease, case, None, learning.ruler)
            return
        tracing.tell({tracing.TRAJECTORIES: sorted(one for ids in case.about.trajectories for one in ids)})
        slots = plan.slots(len(case.about.sections), learning.ruler, judges, group.id)
        scores = await self._scores(lease, case.about, slots, learning.ruler)
        ranking = await asyncio.to_thread(verdict, len(case.about.attempts), scores)
        await self._conclude(lease, case, ranking, learning.ruler)

    def _those(self, request: RankingRequest | None, ruler: RulerSettings) -> Sequence[str]:
        """Return the judges to call.

        Raises:
            Waits: there are none, or all are paused.
        """
        judges = (request.judge,) if request is not None and request.judge else ruler.judges
        if not judges:
            raise Waits(NO_JUDGE, LOOK_AGAIN_S)
        for name in (*judges, *((ruler.strong,) if ruler.strong else ())):
            if name not in self._judges.settings:
                raise Waits(f"no judge is named {name!r}", LOOK_AGAIN_S)
        now = self._tables.now()
        pauses = [self._judges.paused.get(name) for name in (*judges, *ruler.fallback)]
        left = [pause for pause in pauses if pause is not None and pause.until > now]
        if len(left) == len(pauses):
            first = min(left, key=lambda pause: pause.until)
            raise Waits(first.why, (first.until - now).total_seconds())
        return judges

    async def _scores(
        self, lease: GroupLease, about: RankingInput, slots: Sequence[PlannedJudgement], ruler: RulerSettings
    ) -> dict[tuple[int, int], Mapping[int, float]]:
        """Return each attempt's score, by section and place. Sampled judgements are requested too, but not returned."""
        group, now = lease.group, self._tables.now()
        ids = {slot: about.judgement_id(slot, self._judges.settings[slot.judge]) for slot in slots}
        there = await self._tables.write(lambda connection: _opened(connection, group, about, ids, now))
        scores: dict[tuple[int, int], Mapping[int, float]] = {}
        for slot in slots:
            judgement = there[ids[slot]]
            entries = judgement.scores if judgement.state == "accepted" else None
            if slot.purpose == plan.REWARD:
                if entries is None:
                    entries = await JudgementTask(self._judges, lease, about, judgement, slot, ruler).answered()
                scores[slot.section, slot.place] = about.read(slot.section, entries)
            elif entries is None:
                await self._sample(JudgementTask(self._judges, lease, about, judgement, slot, _alone(ruler)))
        return scores

    async def _sample(self, question: JudgementTask) -> None:
        """Get a judgement that gives no reward; if it is not available at once, there is none."""
        try:
            await question.answered()
        except Waits:
            log.info("no judgement to compare with: its row says why")

    async def _conclude(
        self, lease: GroupLease, case: GroupSnapshot, ranking: Verdict | None, ruler: RulerSettings
    ) -> None:
        group, now = lease.group, self._tables.now()
        concluded = await self._tables.write(
            lambda connection: cases.conclude(connection, case, group, ranking, ruler, now, self._rules)
        )
        if concluded is None:
            raise LeaseLost(group.id)
        if not concluded:
            raise Waits("it changed while judges looked at it", 0)
        log.info("ranked" if ranking is not None else "none of its attempts could be ranked")


def _alone(ruler: RulerSettings) -> RulerSettings:
    """Return the settings of a judge without fallbacks."""
    return ruler.model_copy(update={"fallback": ()})


def _opened(
    connection: Connection, group: LeasedGroup, about: RankingInput, ids: Mapping[PlannedJudgement, str], now: datetime
) -> dict[str, Judgement]:
    """Return the judgements of the group; add those that are missing."""
    rubric = {"id": about.rubric_hash, "text": about.rubric, "parts": dict(about.parts) or None}
    rows = [
        {
            "id": judgement_id,
            "group_id": group.id,
            "policy": group.policy,
            "attempts_hash": about.attempts_hash,
            "place": slot.place,
            "section": slot.section,
            "purpose": slot.purpose,
            "state": "waiting",
            "judge": slot.judge,
            "rubric_hash": about.rubric_hash,
            "created_at": now,
            **dict.fromkeys(("calls", "refusals", "left_out", "prompt_tokens", "completion_tokens"), 0),
        }
        for slot, judgement_id in ids.items()
    ]
    return store_ruler.open_judgements(connection, group.project, rubric, rows)
