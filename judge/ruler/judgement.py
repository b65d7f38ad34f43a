"""Get one judgement, with retries. Every call is stored at once.

After an unusable answer the judge is called again with the reason, then another judge is called, then the group waits.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from judge.ruler import plan
from judge.ruler.judge_pool import Judges
from judge.ruler.lease import GroupLease, Waits
from judge.ruler.llm import JudgeError, JudgeUnavailable, TooLarge, ask, priced
from judge.ruler.parse import NotAnswered, read
from judge.ruler.plan import PlannedJudgement
from judge.ruler.prompt import Prompt, build
from judge.ruler.ranking_input import RankingInput
from judge.ruler.snapshot import LOOK_AGAIN_S
from judge.store import ruler as store_ruler
from judge.store.ruler import Judgement, Spent
from whetstone.config.rewards import JudgeSettings, RulerSettings

MARGIN_S = 30.0
"""The group's lease is longer than the longest call by this: time for the database."""
CHARS_PER_TOKEN = 3
"""Fewest characters that a token stands for, including code and other languages than English."""
SHRINK, MOST_SHRINKS = 0.6, 4
"""A prompt that was too long in spite of that is shortened to this share of its length, at most this often."""
LONGEST_WHY = 1000


class JudgementTask:
    """A judgement that a group needs, of the attempts in one section."""

    def __init__(
        self,
        judges: Judges,
        lease: GroupLease,
        about: RankingInput,
        judgement: Judgement,
        slot: PlannedJudgement,
        ruler: RulerSettings,
    ) -> None:
        self._judges, self._lease, self._about = judges, lease, about
        self._slot, self._ruler = slot, ruler
        self._id = judgement.id
        known = judgement.judge in judges.settings
        self._judge = judgement.judge if known else slot.judge
        self._refusals = judgement.refusals if known else 0
        self._refused: str | None = None
        """Why the last answer was refused; the next prompt includes it."""
        self._failures = judgement.calls
        self._most_chars: int | None = None
        self._shrinks = 0

    async def answered(self) -> Mapping[str, Any]:
        """Return its scores, as they are stored.

        Raises:
            Waits: no judge gives them now.
            LeaseLost: another worker has the group.
        """
        while True:
            settings = self._judges.settings.get(self._judge)
            if settings is None:
                raise Waits(f"no judge is named {self._judge!r}", LOOK_AGAIN_S)
            scores = await self._used_again(settings)
            if scores is None:
                async with self._judges.free[self._judge]:
                    # Not before its turn: meanwhile the provider may have answered another call with "retry later".
                    if not self._passed_over():
                        scores = await self._call(settings)
            if scores is not None:
                return scores

    def _passed_over(self) -> bool:
        """Return whether the judge is paused; if so, its successor is next."""
        pause, now = self._judges.paused.get(self._judge), self._lease.tables.now()
        if pause is None or pause.until <= now:
            return False
        after = plan.next_judge(self._judge, self._slot.judge, self._ruler.fallback)
        self._go_on(after, pause.why, (pause.until - now).total_seconds())
        return True

    def _go_on(self, judge: str | None, why: str, wait_s: float) -> None:
        """Continue with this judge; None: there is no other, and the group waits."""
        if judge is None:
            raise Waits(why, wait_s)
        self._judge, self._refusals, self._refused = judge, 0, None
        self._most_chars, self._shrinks = None, 0

    async def _call(self, settings: JudgeSettings) -> Mapping[str, Any] | None:
        """Call the judge once; return None if there is no usable answer."""
        await self._within_budget(settings)
        prompt = await asyncio.to_thread(self._prompt, settings)
        await self._lease.extend(settings.timeout_s + MARGIN_S)
        try:
            answer = await ask(self._judge, settings, prompt.messages, prompt.schema)
        except JudgeError as error:
            await self._unanswered(error, prompt)
            return None
        self._judges.answers(self._judge, self._lease.tables.now())
        spent = Spent(answer.prompt_tokens or 0, answer.completion_tokens or 0, answer.cost_usd)
        try:
            scored = read(answer.text, prompt.ids, self._about.parts)
        except NotAnswered as error:
            await self._not_answered("it was cut off at its longest" if answer.cut_off else str(error), spent)
            return None
        scores = self._about.stored(self._slot.section, scored, prompt.order)
        key = self._about.cache_key(self._slot.section, self._slot.place, settings)
        details = {"model": answer.model, "seconds": answer.seconds, "left_out": prompt.left_out}
        return await self._accept({"scores": scores, "cache_key": key, **details}, spent)

    def _prompt(self, settings: JudgeSettings) -> Prompt:
        room = (settings.context_tokens - settings.max_output_tokens) * CHARS_PER_TOKEN
        attempts = [self._about.attempts[one] for one in self._about.sections[self._slot.section]]
        most_chars = min(room, self._most_chars or room)
        return build(attempts, self._about.rubric, self._about.parts, self._judges.rng, most_chars, self._refused)

    async def _unanswered(self, error: JudgeError, prompt: Prompt) -> None:
        why = f"{self._judge}: {error}"
        self._failures += 1
        if isinstance(error, TooLarge) and self._shrinks < MOST_SHRINKS:
            self._shrinks += 1
            self._most_chars = int(SHRINK * sum(len(message["content"]) for message in prompt.messages))
            await self._note(self._judge, why, "failed", Spent())
            return
        wait_s = plan.wait_s(self._failures, self._judges.rng)
        if isinstance(error, JudgeUnavailable):
            wait_s = self._judges.pause(self._judge, self._lease.tables.now(), why, error.after_s)
        await self._leave(why, "failed", Spent(), wait_s)

    async def _not_answered(self, refused: str, spent: Spent) -> None:
        why = f"{self._judge} gave no scores: {refused}"
        self._failures += 1
        self._refusals += 1
        self._refused = refused
        if self._refusals < self._ruler.tries:
            await self._note(self._judge, why, "refused", spent)
            return
        await self._leave(why, "refused", spent, plan.wait_s(self._failures, self._judges.rng))

    async def _leave(self, why: str, outcome: str, spent: Spent, wait_s: float) -> None:
        """Give up on this judge: its successor is called next, or the group waits for `wait_s`."""
        after = plan.next_judge(self._judge, self._slot.judge, self._ruler.fallback)
        self._refusals = 0
        await self._note(after, why, outcome, spent)
        self._go_on(after, why, wait_s)

    async def _note(self, after: str | None, why: str, outcome: str, spent: Spent) -> None:
        """Store that the call gave nothing, and which judge is next."""
        group, judge = self._lease.group, self._judge
        now, next_judge, refusals = self._lease.tables.now(), after or self._slot.judge, self._refusals

        def write(connection: Connection) -> None:
            store_ruler.note(connection, group.project, self._id, next_judge, refusals, why[:LONGEST_WHY], spent)
            store_ruler.count_day(connection, group.project, group.policy, judge, day_of(now), outcome, spent)

        await self._lease.tables.write(write)

    async def _accept(self, row: Mapping[str, Any], spent: Spent | None) -> Mapping[str, Any]:
        """Store the answer, unless this place has one already; return the scores that count.

        `spent`: of its call, if any.
        """
        group, judge, now = self._lease.group, self._judge, self._lease.tables.now()
        values = {**row, "judge": judge, "accepted_at": now}
        scores: Mapping[str, Any] = row["scores"]

        def write(connection: Connection) -> Mapping[str, Any]:
            accepted = store_ruler.accept(connection, group.project, self._id, values, spent)
            if spent is not None:
                store_ruler.count_day(connection, group.project, group.policy, judge, day_of(now), "accepted", spent)
            return scores if accepted else self._stored(connection)

        return await self._lease.tables.write(write)

    def _stored(self, connection: Connection) -> Mapping[str, Any]:
        """Return the scores that another worker has accepted in this place: those count."""
        scores = store_ruler.judgements(connection, self._lease.group.project, [self._id])[self._id].scores
        assert scores is not None
        return scores

    async def _used_again(self, settings: JudgeSettings) -> Mapping[str, Any] | None:
        """Return the scores of an earlier judgement of exactly the same, if there is one, without a call."""
        project = self._lease.group.project
        key = self._about.cache_key(self._slot.section, self._slot.place, settings)
        earlier = await self._lease.tables.read(
            lambda connection: store_ruler.accepted_before(connection, project, key)
        )
        if earlier is None:
            return None
        scores = self._about.again(self._slot.section, earlier["scores"])
        return await self._accept({**earlier, "scores": scores}, None)

    async def _within_budget(self, settings: JudgeSettings) -> None:
        """Raise Waits if the day's budget is spent. Calls in flight may still exceed it."""
        ruler, group, now = self._ruler, self._lease.group, self._lease.tables.now()
        if ruler.usd_per_day is None and ruler.tokens_per_day is None:
            return
        if ruler.usd_per_day is not None and not priced(settings):
            message = f"usd_per_day is set, but the price of judges.{self._judge} is unknown: set its usd_per_million_…"
            raise Waits(message, LOOK_AGAIN_S)
        day = day_of(now)
        cost_usd, tokens = await self._lease.tables.read(
            lambda connection: store_ruler.spent_on(connection, group.project, group.policy, day)
        )
        spent_usd = ruler.usd_per_day is not None and cost_usd >= ruler.usd_per_day
        if spent_usd or (ruler.tokens_per_day is not None and tokens >= ruler.tokens_per_day):
            midnight = datetime.combine(now.astimezone(UTC).date() + timedelta(days=1), datetime.min.time(), UTC)
            took = f"${cost_usd:.2f}" if spent_usd else f"{tokens} tokens"
            message = f"the budget of {group.policy} for {day} is spent ({took}); judging goes on at midnight UTC"
            raise Waits(message, (midnight - now).total_seconds() + 1)


def day_of(now: datetime) -> str:
    """Return the day of a call, in UTC."""
    return now.astimezone(UTC).date().isoformat()
