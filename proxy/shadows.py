"""Shadow groups: siblings of an ended attempt's last turn, drawn while nobody asks, for a judge to rank.

No app sees them. Off unless a policy's `shadow_share` says otherwise, and never where tools were offered: an answer
nobody acts on may not pretend that somebody did. Whatever an app asks comes first: the drawing is broken off, and
begins again when it is quiet. Knows the order of things; which attempts there are is the store's.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from proxy.address import Address
from proxy.call import Call, Choice
from proxy.drawing import Drawing, WillNotAnswer, drawn
from proxy.errors import UnknownModel, UpstreamDown
from proxy.policies import Policies
from proxy.shares import chosen
from proxy.wire.body import Body, whole
from proxy.wire.completions import TextAsked
from proxy.wire.dialect import Heard, raw
from whetstone.ids import SHADOW, new_id
from whetstone.worth import LearningSettings

QUIET_S = 1.0
"""Nobody asked for so long: it is idle."""
DEFAULT_MAX_TOKENS = 1024
"""For attempts that set no `max_tokens`."""

log = logging.getLogger(__name__)


Mark = tuple[datetime, str]
"""When a trajectory ended, and its id: how far the look has come."""


class Attempt(msgspec.Struct, frozen=True):
    """An ended trajectory whose last turn may have siblings."""

    trajectory_id: str
    policy: str
    task: str | None
    messages: list[msgspec.Raw]
    """The conversation its last answer was given to."""
    prompt_token_ids: list[int]
    sampling: Mapping[str, Any]


class Attempts(Protocol):
    """What SQL knows of them."""

    def ended(self, policies: Sequence[str], after: Mark) -> list[tuple[Mark, Attempt | None]]:
        """The next that ended, the earliest first; None for one whose last turn cannot be drawn again."""
        ...

    def drawn(self, group_id: str) -> bool:
        """This group exists."""
        ...


class Shadows:
    """Draws siblings."""

    def __init__(
        self,
        project: str,
        attempts: Attempts,
        policies: Callable[[], Policies],
        drawing: Drawing,
        max_model_len: Callable[[], int | None],
        quiet_since_s: Callable[[], float | None],
        record: Callable[[Call], None],
        learning: Mapping[str, LearningSettings],
        after: datetime,
    ) -> None:
        """`quiet_since_s`: when the last request of an app ended (monotonic); None while one is served. `after`: what
        ended before then gets none."""
        self._project = project
        self._attempts = attempts
        self._policies = policies
        self._drawing = drawing
        self._max_model_len = max_model_len
        self._quiet_since_s = quiet_since_s
        self._record = record
        self._learning = {name: one for name, one in learning.items() if one.shadow_share > 0}
        self._mark: Mark = (after, "")
        """How far it came."""

    @property
    def wanted(self) -> bool:
        """Some policy wants siblings."""
        return bool(self._learning)

    async def draw(self) -> None:
        """Draw while it is quiet and there is anything to draw. What breaks off begins again with the next turn."""
        mark = self._mark
        while self._quiet():
            found = await asyncio.to_thread(self._attempts.ended, sorted(self._learning), mark)
            for place, attempt in found:
                if attempt is not None and not await self._may_go_on(attempt):
                    self._mark = mark
                    return
                mark = place
            if not found:
                break
        self._mark = mark

    async def _may_go_on(self, attempt: Attempt) -> bool:
        """Draw; whether this attempt is dealt with."""
        try:
            return await self._draw(attempt, self._learning[attempt.policy])
        except (TypeError, ValueError) as error:  # odd values of its own: no other shall wait for them
            log.warning("%s gets no shadow siblings: %s", attempt.trajectory_id, type(error).__name__)
            return True

    def _quiet(self) -> bool:
        since_s = self._quiet_since_s()
        return since_s is not None and time.monotonic() - since_s >= QUIET_S

    async def _draw(self, attempt: Attempt, learning: LearningSettings) -> bool:
        """Draw the siblings of one attempt; False where an app came in between, or vLLM is away: later again."""
        if not chosen(attempt.trajectory_id, learning.shadow_share):
            return True
        group_id = attempt.trajectory_id + SHADOW
        asked = _asked(attempt, learning.shadow_size, self._max_model_len())
        if asked is None or await asyncio.to_thread(self._attempts.drawn, group_id):
            return True
        try:
            speaker = self._policies().resolve(attempt.policy)
        except UnknownModel:
            return True
        call_id, created_at_s, began = new_id(), time.time(), time.perf_counter()
        try:
            heard = await self._unless_somebody_asks(self._drawing.draw(asked, speaker, call_id))
        except UpstreamDown as error:
            log.info("shadow siblings wait: %s", type(error).__name__)
            return False
        except WillNotAnswer:
            log.warning("%s gets no shadow siblings: the model server refuses its prompt", attempt.trajectory_id)
            return True
        if heard is None:
            return False
        self._record(
            drawn(
                asked,
                speaker,
                msgspec.structs.replace(heard, choices=tuple(_as_message(choice) for choice in heard.choices)),
                project=self._project,
                call_id=call_id,
                trajectory_id=new_id(),
                by="shadow",
                address=Address(group_id=group_id, group_size=learning.shadow_size, task=attempt.task),
                messages=attempt.messages,
                end_user=None,
                created_at_s=created_at_s,
                total_ms=(time.perf_counter() - began) * 1000,
            )
        )
        log.info("drew %d shadow siblings of %s", len(heard.choices), attempt.trajectory_id)
        return True

    async def _unless_somebody_asks(self, speaking: Awaitable[Heard | None]) -> Heard | None:
        """What was said; None where an app's request came meanwhile, which then has vLLM to itself."""
        task = asyncio.ensure_future(speaking)
        try:
            while not task.done() and self._quiet_since_s() is not None:
                await asyncio.wait((task,), timeout=0.02)
            return task.result() if task.done() else None
        finally:
            task.cancel()


def _asked(attempt: Attempt, size: int, max_model_len: int | None) -> TextAsked | None:
    """The attempt's last turn, asked once more for so many answers; None where its prompt leaves no room for one."""
    given = attempt.sampling
    most = whole(given.get("max_completion_tokens")) or whole(given.get("max_tokens")) or DEFAULT_MAX_TOKENS
    if max_model_len is not None:
        most = min(most, max_model_len - len(attempt.prompt_token_ids))
    if most < 1:
        return None
    kept = {name: given[name] for name in ("temperature", "stop") if given.get(name) is not None}
    values = {"model": attempt.policy, "prompt": attempt.prompt_token_ids, "n": size, "max_tokens": most} | kept
    return TextAsked(Body({name: raw(value) for name, value in values.items()}, values, attempt.policy), captured=True)


def _as_message(choice: Choice) -> Choice:
    """A text as the chat message it would have been."""
    return msgspec.structs.replace(choice, message={"role": "assistant", "content": choice.text})
