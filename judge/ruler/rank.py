"""Judges look at the groups that are due for them. Joins groups, questions and verdicts; knows no SQL and no formula.

A group is taken for a while; each of its judgements is asked for by itself and stored at once, so a worker that dies
costs the calls it was in. A group is ranked when all its judgements are there. Until then it waits, and says why.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine

from judge import store_ruler
from judge.parts import vetoed
from judge.ruler import panel
from judge.ruler.ask import close, load
from judge.ruler.conversation import conversation
from judge.ruler.held import Held, Lost, Tables, Waits
from judge.ruler.judges import Judges, Pause
from judge.ruler.material import Material, material
from judge.ruler.panel import Slot
from judge.ruler.prompt import DEFAULT_RUBRIC
from judge.ruler.question import LOOK_AGAIN_S, MARGIN_S, Question
from judge.ruler.verdict import Verdict, verdict
from judge.store_ruler import Asked, Judgement, Member, Taken
from whetstone.settings import Settings
from whetstone.worth import JudgeSettings, LearningSettings, RulerSettings

SOON_S = 2.0
"""When to look again for what is on its way: reward functions that have not run."""
NOTHING_TO_RANK = "none of its attempts can be ranked"
NO_JUDGE = "no judge is set up: name one in learning.<policy>.ruler.judges"

log = logging.getLogger(__name__)


async def rank_due(
    engine: Engine,
    settings: Settings,
    clock: Callable[[], datetime] | None = None,
    paused: dict[str, Pause] | None = None,
) -> int:
    """Rank groups until none is due; return how many were looked at.

    As many at a time as the judges may look at (`judges.<name>.concurrency`). `paused`: judges that an earlier pass
    found to be down or busy; this one adds to it.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away. What was stored stands.
    """
    # Else the first group would be held for as long as litellm takes to load.
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
    """The judge with its address where it is `base`: vLLM's base model, asked directly and never through the proxy."""
    if judge.model != "base":
        return judge
    url = f"{settings.vllm.url}/v1" if judge.url is None else judge.url
    return judge.model_copy(update={"model": f"openai/{settings.served_name}", "url": url})


class Ranker:
    """One pass over what is due."""

    def __init__(self, tables: Tables, judges: Judges, settings: Settings) -> None:
        self._tables, self._judges, self._settings = tables, judges, settings

    async def work(self) -> int:
        """Take one group after the other until none is due; return how many."""
        done = 0
        while True:
            group = await self._take()
            if group is None:
                return done
            done += 1
            held = Held(self._tables, group)
            try:
                await self._look(held)
            except Lost:
                log.info("group %s is no longer to be ranked here", held.group.id)

    async def _take(self) -> Taken | None:
        now = self._tables.now()
        until = now + timedelta(seconds=MARGIN_S)
        return await self._tables.write(lambda connection: store_ruler.take(connection, now, until))

    async def _look(self, held: Held) -> None:
        try:
            await self._rank(held)
        except Waits as waits:
            log.info("group %s is not ranked yet: %s", held.group.id, waits)
            await held.keep(waits.seconds, str(waits))

    async def _rank(self, held: Held) -> None:
        group, now = held.group, self._tables.now()
        learning = self._settings.learning_of(group.policy)
        asked, about = await self._tables.read(lambda connection: self._read(connection, group, learning))
        if group.asked_at is not None and asked is None:
            await self._tables.write(lambda connection: store_ruler.decide_again(connection, group, now))
            return
        if about is None:
            await self._conclude(held, asked, None, None, learning.ruler)
            return
        judges = (asked.judge,) if asked is not None and asked.judge else learning.ruler.judges
        if not judges:
            raise Waits(NO_JUDGE, LOOK_AGAIN_S)
        slots = panel.slots(len(about.sections), learning.ruler, judges, group.id)
        there = await self._tables.write(lambda connection: _opened(connection, group, about, slots, now))
        scores: dict[tuple[int, int], Mapping[int, float]] = {}
        for slot in (slot for slot in slots if slot.purpose == panel.REWARD):
            judgement = there[about.judgement_id(slot)]
            said = judgement.scores if judgement.state == "accepted" else None
            if said is None:
                said = await Question(self._judges, held, about, judgement, slot, learning.ruler).answered()
            scores[slot.section, slot.place] = about.read(slot.section, said)
        for slot in (slot for slot in slots if slot.purpose == panel.DRIFT):
            judgement = there[about.judgement_id(slot)]
            if judgement.state != "accepted":
                await self._sample(Question(self._judges, held, about, judgement, slot, alone(learning.ruler)))
        await self._conclude(held, asked, about, verdict(len(about.attempts), scores), learning.ruler)

    def _read(
        self, connection: Connection, group: Taken, learning: LearningSettings
    ) -> tuple[Asked | None, Material | None]:
        """Who asks for the ranking, and what there is to rank; None: nothing.

        What broke off with the reward of a failure, or was vetoed, is left out: a rule has decided on it.
        """
        asked = store_ruler.asked(connection, group)
        members = store_ruler.members(connection, group)
        if any(member.code_due_at is not None for member in members):
            raise Waits("its reward functions have not run yet", SOON_S)
        ranked = [one for one in members if not _decided(one, learning)]
        conversations = [conversation(one.id, store_ruler.turns(connection, group.project, one.id)) for one in ranked]
        if not any(one.lines for one in conversations):
            return asked, None
        rubric = asked.rubric if asked is not None else None
        task = next((one.task for one in ranked if one.task is not None), None)
        rubric = rubric or _rubric(learning.ruler, task)
        return asked, material(group.id, conversations, rubric, learning.ruler)

    async def _sample(self, question: Question) -> None:
        """A judgement that rewards nothing: where it cannot be had at once, there is none."""
        try:
            await question.answered()
        except Waits as waits:
            log.info("no judgement to compare with: %s", waits)

    async def _conclude(
        self, held: Held, asked: Asked | None, about: Material | None, said: Verdict | None, ruler: RulerSettings
    ) -> None:
        """Give the scores as feedback on the group; without any, say so."""
        group, now = held.group, self._tables.now()
        rewards: dict[str, float] = {}
        if about is not None and said is not None:
            each = zip(about.trajectories, said.scores_G, strict=True)
            rewards = {trajectory_id: score for ids, score in each for trajectory_id in ids}
        reviewed = {one for one in rewards if panel.sampled(f"review {one}", ruler.review_share)}
        noise = said.noise if said is not None else None
        feedback = _feedback(group, asked, rewards, now)
        concluded = await self._tables.write(
            lambda connection: store_ruler.conclude(connection, group, feedback, noise, reviewed, now)
        )
        if not concluded:
            raise Lost(group.id)


def alone(ruler: RulerSettings) -> RulerSettings:
    """The settings of a judge that nobody stands in for."""
    return ruler.model_copy(update={"fallback": ()})


def _decided(member: Member, learning: LearningSettings) -> bool:
    return member.reward_source == "failure" or vetoed(member.code_parts or {}, learning)


def _rubric(ruler: RulerSettings, task: str | None) -> str:
    path = ruler.rubrics.get(task, ruler.rubric) if task is not None else ruler.rubric
    if path is None:
        return DEFAULT_RUBRIC
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Waits(f"the rubric {path} cannot be read: {error}", LOOK_AGAIN_S) from error


def _opened(
    connection: Connection, group: Taken, about: Material, slots: Sequence[Slot], now: datetime
) -> dict[str, Judgement]:
    """The judgements of the group, those added that were not there."""
    rubric = {"id": about.rubric_hash, "text": about.rubric, "parts": dict(about.parts) or None}
    rows = [
        {
            "id": about.judgement_id(slot),
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
        for slot in slots
    ]
    return store_ruler.open_judgements(connection, group.project, rubric, rows)


def _feedback(group: Taken, asked: Asked | None, rewards: Mapping[str, float], now: datetime) -> dict[str, Any] | None:
    """The scores as a row of table `feedback`: the one that asked for them, else one of ours."""
    if asked is None and not rewards:
        return None
    return {
        "id": asked.id if asked is not None else own_id(group.id),
        "target_kind": "group",
        "target_id": group.id,
        "choice": 0,
        "rewards": dict(rewards) or None,
        "source": "judge",
        "final": True,
        "judge": {"kind": "ruler"},
        "state": "waiting" if rewards else "unused",
        "reason": None if rewards else NOTHING_TO_RANK,
        "created_at": asked.created_at if asked is not None else now,
        "due_at": now if rewards else None,
    }


def own_id(group_id: str) -> str:
    """Id of the feedback that ranks a group which nobody asked to rank: the same however often it is ranked."""
    return hashlib.blake2b(f"judge {group_id}".encode(), digest_size=16).hexdigest()
