"""Rank the groups that are due for judges: read a group, get its judgements, store the verdict.

A group is leased; each of its judgements is requested separately and stored at once, so a worker that dies loses only
the calls in flight. A group is ranked when all its judgements exist. Until then it waits, with a stored reason.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import InterfaceError, OperationalError

from judge.decisions.feedback import NO_JUDGE
from judge.ruler.aggregate import Verdict, verdict
from judge.ruler.judgement import MARGIN_S, JudgementTask, Judges, Pause
from judge.ruler.lease import (
    LOOK_AGAIN_S,
    GroupLease,
    GroupSnapshot,
    LeaseLost,
    Tables,
    Waits,
    conclude,
    own_id,
    read_group,
)
from judge.ruler.llm import close, load
from judge.ruler.ranking_input import REWARD, PlannedJudgement, RankingInput, slots
from judge.settlement.sweep import rules_of
from judge.store import ruler as store_ruler
from whetstone.config.rewards import BASE, JudgeSettings, RulerSettings
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
    ranker = Ranker(tables, Judges(known, {} if paused is None else paused, settings), settings)
    await tables.write(store_ruler.forget_over, tables.now())
    at_once = max((judge.concurrency for judge in known.values()), default=1)
    workers = [asyncio.ensure_future(ranker.work()) for _ in range(at_once)]
    try:
        return sum(await asyncio.gather(*workers))
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await close()


def reached(judge: JudgeSettings, settings: Settings) -> JudgeSettings:
    """Return the judge; for `base` with the address of vLLM's base model, called directly, not through the proxy. That
    costs nothing, unless the settings have a price."""
    if judge.model != BASE:
        return judge
    url = f"{settings.vllm.urls[0]}/v1" if judge.url is None else judge.url
    changed: dict[str, Any] = {"model": f"openai/{settings.served_name}", "url": url}
    if judge.usd_per_million_prompt_tokens is None and judge.usd_per_million_completion_tokens is None:
        changed |= {"usd_per_million_prompt_tokens": 0.0, "usd_per_million_completion_tokens": 0.0}
    return judge.model_copy(update=changed)


class Ranker:
    """One pass over the due groups."""

    def __init__(self, tables: Tables, judges: Judges, settings: Settings) -> None:
        self._tables, self._judges, self._settings = tables, judges, settings
        self._rules = rules_of(settings.groups, settings.learning, settings.judges)

    async def work(self) -> int:
        """Take one group after the other until none is due; return their number."""
        done = 0
        while True:
            now = self._tables.now()
            group = await self._tables.write(store_ruler.take, now, now + timedelta(seconds=MARGIN_S))
            if group is None:
                return done
            done += 1
            with (
                log_setup.about(project=group.project, group=group.id, policy=group.policy),
                tracing.span("rank group", {tracing.PROJECT: group.project, tracing.GROUP: group.id}),
            ):
                try:
                    await self._look(GroupLease(self._tables, group))
                except LeaseLost:
                    log.info("no longer to be ranked here")

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
        group = lease.group
        learning = self._settings.learning_of(group.policy)
        request = await self._tables.read(store_ruler.ranking_request, group)
        if group.requested_at is not None and request is None:
            await self._tables.write(store_ruler.decide_again, group, self._tables.now())
            return
        if request is None and await self._tables.read(store_ruler.is_withdrawn, group.project, own_id(group.id)):
            await self._conclude(lease, GroupSnapshot(group, None, None, None), None, learning.ruler)
            return
        judges = self._those(request, learning.ruler)
        case = await self._tables.read(read_group, group, request, learning)
        ranking = None
        if case.about is not None:
            tracing.tell({tracing.TRAJECTORIES: sorted(one for ids in case.about.trajectories for one in ids)})
            needed = slots(len(case.about.sections), learning.ruler, judges, group.id)
            scores = await self._scores(lease, case.about, needed, learning.ruler)
            ranking = await asyncio.to_thread(verdict, len(case.about.attempts), scores)
        await self._conclude(lease, case, ranking, learning.ruler)

    def _those(self, request: store_ruler.RankingRequest | None, ruler: RulerSettings) -> Sequence[str]:
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
        pauses = [self._judges.pause_of(name, now) for name in (*judges, *ruler.fallback)]
        if None not in pauses:
            first = min(filter(None, pauses), key=lambda pause: pause.until)
            raise Waits(first.why, (first.until - now).total_seconds())
        return judges

    async def _scores(
        self, lease: GroupLease, about: RankingInput, needed: Sequence[PlannedJudgement], ruler: RulerSettings
    ) -> dict[tuple[int, int], Mapping[int, float]]:
        """Return each attempt's score, by section and place. Sampled judgements are requested too, but not returned."""
        ids = {slot: about.judgement_id(slot, self._judges.settings[slot.judge]) for slot in needed}
        rubric = {"id": about.rubric_hash, "text": about.rubric, "parts": dict(about.parts) or None}
        rows = {
            ids[slot]: {
                "group_id": lease.group.id,
                "policy": lease.group.policy,
                "attempts_hash": about.attempts_hash,
                "place": slot.place,
                "section": slot.section,
                "purpose": slot.purpose,
                "state": "waiting",
                "judge": slot.judge,
                "rubric_hash": about.rubric_hash,
                "created_at": self._tables.now(),
                **dict.fromkeys(("calls", "refusals", "left_out", "prompt_tokens", "completion_tokens"), 0),
            }
            for slot in needed
        }
        there = await self._tables.write(store_ruler.open_judgements, lease.group.project, rubric, rows)
        scores: dict[tuple[int, int], Mapping[int, float]] = {}
        for slot in needed:
            judgement = there[ids[slot]]
            entries = judgement.scores if judgement.state == "accepted" else None
            if slot.purpose == REWARD:
                if entries is None:
                    entries = await JudgementTask(self._judges, lease, about, judgement, slot, ruler).answered()
                scores[slot.section, slot.place] = about.read(slot.section, entries)
            elif entries is None:
                # By this judge alone, and not waited for: without it there is nothing to compare with.
                alone = ruler.model_copy(update={"fallback": ()})
                try:
                    await JudgementTask(self._judges, lease, about, judgement, slot, alone).answered()
                except Waits:
                    log.info("no judgement to compare with: its row says why")
        return scores

    async def _conclude(
        self, lease: GroupLease, case: GroupSnapshot, ranking: Verdict | None, ruler: RulerSettings
    ) -> None:
        now = self._tables.now()
        concluded = await self._tables.write(conclude, case, lease.group, ranking, ruler, now, self._rules)
        if concluded is None:
            raise LeaseLost(lease.group.id)
        if not concluded:
            raise Waits("it changed while judges looked at it", 0)
        log.info("ranked" if ranking is not None else "none of its attempts could be ranked")
