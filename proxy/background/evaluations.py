"""Sample the answers of a candidate and its parent to held-out prompts, with lower priority than the apps' requests.

The trainer decides which answers are due. Each answer becomes a trajectory of the split `eval`. Two proxies may sample
the same answer at the same moment: the trajectory's id is given in advance and is also the completion's id, so the
second proxy finds it recorded.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from proxy.background.sampler import BackgroundSampler, PromptRejected, SampleFailed
from proxy.background.store import BackgroundTables, DueAnswer
from proxy.domain.address import Address
from proxy.domain.policies import Policies
from proxy.errors import UnknownModel, UpstreamDown
from proxy.wire.chat.request import ChatRequest
from proxy.wire.decoding import raw
from proxy.wire.request_body import Body
from whetstone.domain.ids import new_id, version_id

AT_ONCE = 4
"""Most answers sampled at the same time: a request of an app waits for few of them at most."""
NOT_COPIED = frozenset({"stream", "stream_options", "n", "best_of", "model", "messages", "tools"})
"""Fields of the source's request that are not copied."""
MOST_TRIES = 3
"""Most tries of a prompt on which vLLM fails; then it is given up, so that the test can end without it."""
BOTH = 2
"""Answers in a group: the candidate's and its parent's."""

log = logging.getLogger(__name__)


class EvaluationSampler:
    """Samples the due answers of one project."""

    def __init__(self, tables: BackgroundTables, policies: Callable[[], Policies], drawing: BackgroundSampler) -> None:
        self._tables = tables
        self._policies = policies
        self._drawing = drawing
        self._failures: Counter[str] = Counter()

    async def draw(self) -> None:
        """Sample everything that is due."""
        while (due := await asyncio.to_thread(self._tables.due)) and await self._draw_all(due):
            pass

    async def _draw_all(self, due: Sequence[DueAnswer]) -> bool:
        """Sample these answers, some at once; return False if vLLM is not available now."""
        # In random order, so that several proxies do not all begin with the same answers.
        left = iter(random.sample(due, len(due)))

        async def draw() -> bool:
            for one in left:
                if await asyncio.to_thread(self._tables.is_due, one.trajectory_id) and not await self._draw(one):
                    return False
            return True

        try:
            async with asyncio.TaskGroup() as together:
                drawing = [together.create_task(draw()) for _ in range(AT_ONCE)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return all(one.result() for one in drawing)

    async def _draw(self, due: DueAnswer) -> bool:
        """Sample one answer; return False if that is not possible now."""
        created_at_s, began = time.time(), time.perf_counter()
        try:
            served_version = self._policies().resolve(version_id(due.policy, due.version))
            request = _request(due)
            result = await self._drawing.draw(request, served_version, new_id())
        except (UnknownModel, UpstreamDown) as error:
            # Count only errors that this prompt may have caused, not that vLLM is unavailable or does not have the
            # version yet.
            self._failures[due.trajectory_id] += isinstance(error, SampleFailed)
            if self._failures[due.trajectory_id] < MOST_TRIES:
                log.info("%s is sampled later: %s", due.trajectory_id, type(error).__name__)
            else:
                await asyncio.to_thread(
                    self._tables.over, due.trajectory_id, f"given up after {MOST_TRIES} tries: {error}"
                )
            return False
        except PromptRejected as error:
            await asyncio.to_thread(self._tables.over, due.trajectory_id, str(error))
            return True
        self._drawing.record(
            request,
            served_version,
            result,
            call_id=due.trajectory_id,
            trajectory_id=due.trajectory_id,
            by="evaluation",
            address=Address(group_id=due.group_id, group_size=BOTH, task=due.task, split="eval", metadata=due.metadata),
            messages=request.messages,
            end_user=due.end_user,
            created_at_s=created_at_s,
            total_ms=(time.perf_counter() - began) * 1000,
        )
        await asyncio.to_thread(self._tables.over, due.trajectory_id)
        return True


def _request(due: DueAnswer) -> ChatRequest:
    """Return the prompt's original request, sampling fields included, for one answer that is not streamed."""
    sampling = {name: value for name, value in due.sampling.items() if name not in NOT_COPIED}
    tools = {} if due.tools is None else {"tools": due.tools}
    values = {**sampling, "model": due.policy, "messages": due.messages, **tools}
    return ChatRequest(Body({name: raw(value) for name, value in values.items()}, values, due.policy))
