"""Held-out prompts that a candidate and its parent are to answer: drawn one by one, behind all that apps ask.

The trainer says which; each answer becomes a trajectory of the split `eval`. Two proxies may draw the same one at the
same moment: the trajectory's id is given and its completion bears it, so that the second finds it there. Knows the
order of things; which are due is the store's.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from proxy.address import Address
from proxy.call import Call
from proxy.drawing import Drawing, Stumbled, WillNotAnswer, drawn
from proxy.errors import UnknownModel, UpstreamDown
from proxy.policies import Policies
from proxy.wire.body import Body
from proxy.wire.chat import ChatAsked
from proxy.wire.dialect import raw
from whetstone.ids import new_id, version_id

AT_ONCE = 4
"""Answers that are drawn at the same time: what an app asks waits for few of them at most."""
ANOTHER = frozenset({"stream", "stream_options", "n", "best_of", "model", "messages", "tools"})
"""Fields of the source's request that are not repeated as they were."""
MOST_TRIES = 3
"""So often a prompt is asked that vLLM stumbles over; then it is given up, so that the test can end without it."""
BOTH = 2
"""Answers in a group: the candidate's and its parent's."""

log = logging.getLogger(__name__)


class Due(msgspec.Struct, frozen=True):
    """An answer that is to be drawn, and what its prompt was asked with."""

    trajectory_id: str
    group_id: str
    policy: str
    version: int
    task: str | None
    metadata: dict[str, Any] | None
    end_user: str | None
    messages: list[Any]
    tools: list[Any] | None
    sampling: dict[str, Any]


class Evaluations(Protocol):
    """What SQL knows of them."""

    def due(self) -> list[Due]:
        """Some that are due."""
        ...

    def is_due(self, trajectory_id: str) -> bool:
        """Nobody has drawn it meanwhile, nor ended its test."""
        ...

    def over(self, trajectory_id: str, error: str | None = None) -> None:
        """It was drawn, or cannot be."""
        ...


class Evaluating:
    """Draws them."""

    def __init__(
        self,
        project: str,
        evaluations: Evaluations,
        policies: Callable[[], Policies],
        drawing: Drawing,
        record: Callable[[Call], None],
    ) -> None:
        self._project = project
        self._evaluations = evaluations
        self._policies = policies
        self._drawing = drawing
        self._record = record
        self._stumbled: Counter[str] = Counter()

    async def draw(self) -> None:
        """Draw what is due."""
        while (due := await asyncio.to_thread(self._evaluations.due)) and await self._draw_all(due):
            pass

    async def _draw_all(self, due: Sequence[Due]) -> bool:
        """Draw them, some at once; False where vLLM cannot be asked now."""
        # In an order of its own: the others of several proxies begin elsewhere.
        left = iter(random.sample(due, len(due)))

        async def draw() -> bool:
            for one in left:
                if await asyncio.to_thread(self._evaluations.is_due, one.trajectory_id) and not await self._draw(one):
                    return False
            return True

        try:
            async with asyncio.TaskGroup() as together:
                drawing = [together.create_task(draw()) for _ in range(AT_ONCE)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return all(one.result() for one in drawing)

    async def _draw(self, due: Due) -> bool:
        """Draw one; False where that cannot be done now."""
        created_at_s, began = time.time(), time.perf_counter()
        try:
            speaker = self._policies().resolve(version_id(due.policy, due.version))
            asked = _asked(due)
            heard = await self._drawing.draw(asked, speaker, new_id())
        except (UnknownModel, UpstreamDown) as error:
            # Only what may be this prompt's doing counts: not that nobody can be reached, or lacks the version yet.
            self._stumbled[due.trajectory_id] += isinstance(error, Stumbled)
            if self._stumbled[due.trajectory_id] < MOST_TRIES:
                log.info("%s waits to be answered: %s", due.trajectory_id, type(error).__name__)
            else:
                why = f"given up after {MOST_TRIES} tries: {error}"
                await asyncio.to_thread(self._evaluations.over, due.trajectory_id, why)
            return False
        except WillNotAnswer as error:
            await asyncio.to_thread(self._evaluations.over, due.trajectory_id, str(error))
            return True
        self._record(
            drawn(
                asked,
                speaker,
                heard,
                project=self._project,
                call_id=due.trajectory_id,
                trajectory_id=due.trajectory_id,
                by="evaluation",
                address=Address(
                    group_id=due.group_id, group_size=BOTH, task=due.task, split="eval", metadata=due.metadata
                ),
                messages=asked.messages,
                end_user=due.end_user,
                created_at_s=created_at_s,
                total_ms=(time.perf_counter() - began) * 1000,
            )
        )
        await asyncio.to_thread(self._evaluations.over, due.trajectory_id)
        return True


def _asked(due: Due) -> ChatAsked:
    """The prompt as it was asked, its sampling included, for one answer at once."""
    kept = {name: value for name, value in due.sampling.items() if name not in ANOTHER}
    values = {**kept, "model": due.policy, "messages": due.messages}
    if due.tools is not None:
        values["tools"] = due.tools
    return ChatAsked(Body({name: raw(value) for name, value in values.items()}, values, due.policy), captured=True)
