"""The judges of this process, and how one judgement is got from them, with retries. Every call is stored at once.

After an unusable answer the judge is called again with the reason, then another judge is called, then the group waits.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from judge.ruler.conversation import Conversation
from judge.ruler.errors import CallFailed, JudgeUnavailable, TooLarge
from judge.ruler.lease import LOOK_AGAIN_S, GroupLease, Waits
from judge.ruler.llm import ask, priced
from judge.ruler.parse import NotAnswered, read
from judge.ruler.prompt import Prompt, build
from judge.ruler.ranking_input import PlannedJudgement, RankingInput
from judge.store import ruler as store_ruler
from whetstone.config.rewards import JudgeSettings, RulerSettings
from whetstone.config.settings import Settings
from whetstone.config.spending import known_prices
from whetstone.registry.spending import day_of, next_day, read_spending

MARGIN_S = 30.0
"""The group's lease is longer than the longest call by this: time for the database."""
CHARS_PER_TOKEN = 3
"""Fewest characters that a token stands for, including code and other languages than English."""
SHRINK, MOST_SHRINKS = 0.6, 4
"""A prompt that was too long in spite of that is shortened to this share of its length, at most this often."""
LONGEST_WHY = 1000
LONGEST_WAIT_S = 3600.0
"""Judges that give nothing are called again after about 2, 4, 8, … seconds, at most after this many."""
SPREAD = 0.25
"""Waits vary randomly by this share, so that judges that failed together are not called again together."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a judge."""

    until: datetime
    why: str
    failures: int
    """Number of failures in a row."""


@dataclass(slots=True)
class Judges:
    """The configured judges, how many groups each may rank at once, and which are paused."""

    settings: Mapping[str, JudgeSettings]
    paused: dict[str, Pause]
    """By judge; shared with later passes."""
    whole: Settings
    """All settings, for the spending cap."""
    free: dict[str, asyncio.Semaphore] = field(init=False)
    rng: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        """Create a semaphore for each judge."""
        self.free = {name: asyncio.Semaphore(judge.concurrency) for name, judge in self.settings.items()}

    def pause_of(self, name: str, now: datetime) -> Pause | None:
        """Return the judge's pause, if it still runs."""
        pause = self.paused.get(name)
        return pause if pause is not None and pause.until > now else None

    def pause(self, name: str, now: datetime, why: str, after_s: float | None) -> float:
        """Pause a judge that did not answer, for at least `after_s` seconds; return the length of the pause in seconds.

        Calls that were in flight together count as one failure: while a pause runs, another failure only extends it, to
        `after_s` from now.
        """
        if before := self.pause_of(name, now):
            until = now + timedelta(seconds=after_s or 0.0)
            if until > before.until:
                self.paused[name] = Pause(until, why, before.failures)
            return (max(until, before.until) - now).total_seconds()
        failures = 1 + (self.paused[name].failures if name in self.paused else 0)
        wait_s = max(after_s or 0.0, self.wait_s(failures))
        self.paused[name] = Pause(now + timedelta(seconds=wait_s), why, failures)
        return wait_s

    def answers(self, name: str, now: datetime) -> None:
        """Record that the judge answers. A running pause stays: the call may have begun before the pause."""
        if self.pause_of(name, now) is None:
            self.paused.pop(name, None)

    def wait_s(self, failures: int) -> float:
        """Return the wait after this many failed calls in a row: it doubles each time, and varies by a quarter.

        Never over `LONGEST_WAIT_S`; the longest waits vary too, below it.
        """
        wait = min(LONGEST_WAIT_S / (1 + SPREAD), 2.0 ** min(failures, 12))
        return min(LONGEST_WAIT_S, wait * self.rng.uniform(1 - SPREAD, 1 + SPREAD))


def next_judge(judge: str, first: str, fallback: Sequence[str]) -> str | None:
    """Return the judge to call when `judge` does not answer in the place of `first`; None: there is none left."""
    order = [first, *(name for name in fallback if name != first)]
    later = order[order.index(judge) + 1 :] if judge in order else [first]
    return later[0] if later else None


class JudgementTask:
    """A judgement that a group needs, of the attempts in one section."""

    def __init__(
        self,
        judges: Judges,
        lease: GroupLease,
        about: RankingInput,
        judgement: store_ruler.Judgement,
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
        now = self._lease.tables.now()
        pause = self._judges.pause_of(self._judge, now)
        if pause is not None:
            self._go_on(self._successor(), pause.why, (pause.until - now).total_seconds())
        return pause is not None

    def _successor(self) -> str | None:
        return next_judge(self._judge, self._slot.judge, self._ruler.fallback)

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
        except CallFailed as error:
            await self._unanswered(error, prompt)
            return None
        self._judges.answers(self._judge, self._lease.tables.now())
        spent = store_ruler.Spent(answer.prompt_tokens or 0, answer.completion_tokens or 0, answer.cost_usd)
        try:
            scored = read(answer.text, prompt.ids, self._about.parts, self._answers)
        except NotAnswered as error:
            await self._not_answered("it was cut off at its longest" if answer.cut_off else str(error), spent)
            return None
        row = {
            "scores": self._about.stored(self._slot.section, scored, prompt.order),
            "cache_key": self._about.cache_key(self._slot.section, self._slot.place, settings),
            "model": answer.model,
            "seconds": answer.seconds,
            "left_out": prompt.left_out,
        }
        return await self._accept(row, spent)

    def _prompt(self, settings: JudgeSettings) -> Prompt:
        room = (settings.context_tokens - settings.max_output_tokens) * CHARS_PER_TOKEN
        most_chars = min(room, self._most_chars or room)
        about, rng = self._about, self._judges.rng
        return build(self._attempts, about.rubric, about.parts, rng, most_chars, self._refused, by_turn=about.by_turn)

    @property
    def _attempts(self) -> list[Conversation]:
        """The attempts of its section."""
        return [self._about.attempts[one] for one in self._about.sections[self._slot.section]]

    @property
    def _answers(self) -> list[int] | None:
        """How many answers each of them has, where they are scored one by one."""
        return [one.answers for one in self._attempts] if self._about.by_turn else None

    async def _unanswered(self, error: CallFailed, prompt: Prompt) -> None:
        why, wait_s = f"{self._judge}: {error}", None
        if isinstance(error, TooLarge) and self._shrinks < MOST_SHRINKS:
            self._shrinks += 1
            self._most_chars = int(SHRINK * sum(len(message["content"]) for message in prompt.messages))
            await self._note(self._judge, why, "failed", store_ruler.Spent())
            return
        if isinstance(error, JudgeUnavailable):
            wait_s = self._judges.pause(self._judge, self._lease.tables.now(), why, error.after_s)
        await self._leave(why, "failed", store_ruler.Spent(), wait_s)

    async def _not_answered(self, refused: str, spent: store_ruler.Spent) -> None:
        why = f"{self._judge} gave no scores: {refused}"
        self._refusals += 1
        self._refused = refused
        if self._refusals < self._ruler.tries:
            await self._note(self._judge, why, "refused", spent)
        else:
            await self._leave(why, "refused", spent)

    async def _leave(self, why: str, outcome: str, spent: store_ruler.Spent, wait_s: float | None = None) -> None:
        """Give up on this judge: its successor is called next, or the group waits for `wait_s`."""
        after = self._successor()
        self._refusals = 0
        await self._note(after, why, outcome, spent)
        self._go_on(after, why, self._judges.wait_s(self._failures) if wait_s is None else wait_s)

    async def _note(self, after: str | None, why: str, outcome: str, spent: store_ruler.Spent) -> None:
        """Store that the call gave nothing, and which judge is next."""
        self._failures += 1
        values = {"judge": after or self._slot.judge, "refusals": self._refusals, "error": why[:LONGEST_WHY]}
        called = (self._judge, self._lease.tables.now(), outcome, spent)
        await self._lease.tables.write(store_ruler.note, self._lease.group, self._id, values, *called)

    async def _accept(self, row: Mapping[str, Any], spent: store_ruler.Spent | None) -> Mapping[str, Any]:
        """Store the answer, unless this place has one already; return the scores that count.

        `spent`: of its call, if any.
        """
        values = {**row, "judge": self._judge, "accepted_at": self._lease.tables.now()}
        return await self._lease.tables.write(store_ruler.accept, self._lease.group, self._id, values, spent)

    async def _used_again(self, settings: JudgeSettings) -> Mapping[str, Any] | None:
        """Return the scores of an earlier judgement of exactly the same, if there is one, without a call."""
        key = self._about.cache_key(self._slot.section, self._slot.place, settings)
        earlier = await self._lease.tables.read(store_ruler.accepted_before, self._lease.group.project, key)
        if earlier is None:
            return None
        return await self._accept(earlier | {"scores": self._about.again(self._slot.section, earlier["scores"])}, None)

    async def _under_cap(self, settings: JudgeSettings) -> None:
        """Raise Waits if the day's money of the whole stack is spent, unless the judge costs nothing."""
        cap, now = self._judges.whole.spending.usd_per_day, self._lease.tables.now()
        if cap is None:
            return
        if not priced(settings):
            raise Waits(
                f"spending.usd_per_day is set, but the price of judges.{self._judge} is unknown: set its "
                "usd_per_million_…",
                LOOK_AGAIN_S,
            )
        prices = known_prices(settings.usd_per_million_prompt_tokens, settings.usd_per_million_completion_tokens)
        if prices is not None and prices.is_free:
            return
        spent = await self._lease.tables.read(read_spending, self._judges.whole, now)
        if spent.usd >= cap:
            raise Waits(
                f"the spending cap of ${cap:,.2f} a day is reached (${spent.usd:,.2f} on {spent.day}); judging resumes "
                "at midnight UTC",
                (next_day(now) - now).total_seconds() + 1,
            )

    async def _within_budget(self, settings: JudgeSettings) -> None:
        """Raise Waits if the day's budget is spent. Calls in flight may still exceed it."""
        await self._under_cap(settings)
        ruler, group, now = self._ruler, self._lease.group, self._lease.tables.now()
        if ruler.usd_per_day is None and ruler.tokens_per_day is None:
            return
        if ruler.usd_per_day is not None and not priced(settings):
            raise Waits(
                f"usd_per_day is set, but the price of judges.{self._judge} is unknown: set its usd_per_million_…",
                LOOK_AGAIN_S,
            )
        day = day_of(now)
        cost_usd, tokens = await self._lease.tables.read(store_ruler.spent_on, group.project, group.policy, day)
        spent_usd = ruler.usd_per_day is not None and cost_usd >= ruler.usd_per_day
        if spent_usd or (ruler.tokens_per_day is not None and tokens >= ruler.tokens_per_day):
            took = f"${cost_usd:.2f}" if spent_usd else f"{tokens} tokens"
            raise Waits(
                f"the budget of {group.policy} for {day} is spent ({took}); judging resumes at midnight UTC",
                (next_day(now) - now).total_seconds() + 1,
            )
