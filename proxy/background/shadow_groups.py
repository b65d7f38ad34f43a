"""Sample shadow groups: siblings of an ended attempt's last turn, for a judge to rank, while vLLM is idle.

No app sees them. They are off unless a policy's `shadow_share` is above 0, and never sampled where tools were offered:
no app executes the tool calls of such an answer. Siblings of an attempt at temperature 0 are sampled at the temperature
that its policy explores with: a step learns from them, not from the attempt. Requests of apps come first: sampling is
aborted when one arrives, and starts again when the proxy is idle.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import msgspec

from proxy.background.sampler import BackgroundSampler, PromptRejected
from proxy.background.store import Attempt, BackgroundTables, Mark
from proxy.domain.address import Address
from proxy.domain.policies import Policies
from proxy.errors import UnknownModel, UpstreamDown
from proxy.wire.chat.request import ChatRequest
from proxy.wire.completions import TextRequest
from proxy.wire.decoding import raw
from proxy.wire.interfaces import PromptResult
from proxy.wire.request_body import Body, whole
from whetstone.config.rewards import RewardSettings
from whetstone.domain.ids import SHADOW, new_id
from whetstone.domain.sampling_share import in_share

QUIET_S = 1.0
"""The proxy counts as idle after so long without a request of an app."""
DEFAULT_MAX_TOKENS = 1024
"""For attempts that set no `max_tokens`."""

log = logging.getLogger(__name__)


class Shadows:
    """Samples siblings of ended attempts."""

    def __init__(
        self,
        tables: BackgroundTables,
        policies: Callable[[], Policies],
        drawing: BackgroundSampler,
        max_model_len: Callable[[], int | None],
        quiet_since_s: Callable[[], float | None],
        learning: Mapping[str, RewardSettings],
        after: datetime,
    ) -> None:
        """Create the sampler of siblings. `quiet_since_s`: when the last request of an app ended (monotonic); None
        while one is served. `after`: attempts that ended before then get no siblings."""
        self._tables = tables
        self._policies = policies
        self._drawing = drawing
        self._max_model_len = max_model_len
        self._quiet_since_s = quiet_since_s
        self._learning = {name: one for name, one in learning.items() if one.shadow_share > 0}
        self._exploring = [name for name, one in self._learning.items() if one.explore.temperature is not None]
        self._mark: Mark = (after, "")
        """How far the search has come."""

    @property
    def wanted(self) -> bool:
        """Return whether a policy wants siblings."""
        return bool(self._learning)

    async def draw(self) -> None:
        """Sample while the proxy is idle and there are attempts left. An aborted attempt starts again in the next
        call."""
        mark = self._mark
        policies = sorted(self._learning)
        while self._quiet() and (
            attempts := await asyncio.to_thread(self._tables.ended, policies, self._exploring, mark)
        ):
            for place, attempt in attempts:
                if attempt is not None and not await self._try_attempt(attempt):
                    self._mark = mark
                    return
                mark = place
        self._mark = mark

    async def _try_attempt(self, attempt: Attempt) -> bool:
        """Sample the siblings of an attempt; return whether it is done with."""
        try:
            return await self._draw(attempt, self._learning[attempt.policy])
        except (TypeError, ValueError) as error:  # bad values of this attempt must not block the others
            log.warning("%s gets no shadow siblings: %s", attempt.trajectory_id, type(error).__name__)
            return True

    def _quiet(self) -> bool:
        since_s = self._quiet_since_s()
        return since_s is not None and time.monotonic() - since_s >= QUIET_S

    async def _draw(self, attempt: Attempt, learning: RewardSettings) -> bool:
        """Sample the siblings of one attempt; return False to retry it later, if a request of an app arrived or vLLM is
        not available."""
        if not in_share(attempt.trajectory_id, learning.shadow_share):
            return True
        group_id = attempt.trajectory_id + SHADOW
        request = _request(attempt, learning, self._max_model_len())
        if request is None or await asyncio.to_thread(self._tables.group_exists, group_id):
            return True
        try:
            served_version = self._policies().resolve(attempt.policy)
        except UnknownModel:
            return True
        call_id, created_at_s, began = new_id(), time.time(), time.perf_counter()
        try:
            result = await self._unless_app_requests(self._drawing.draw(request, served_version, call_id))
        except UpstreamDown as error:
            log.info("shadow siblings are sampled later: %s", type(error).__name__)
            return False
        except PromptRejected:
            log.warning("%s gets no shadow siblings: the model server refuses its prompt", attempt.trajectory_id)
            return True
        if result is None:
            return False
        # Each text becomes the chat message that it would have been.
        choices = tuple(
            msgspec.structs.replace(choice, message={"role": "assistant", "content": choice.text})
            for choice in result.choices
        )
        self._drawing.record(
            request,
            served_version,
            msgspec.structs.replace(result, choices=choices),
            call_id=call_id,
            trajectory_id=new_id(),
            by="shadow",
            address=Address(group_id=group_id, group_size=learning.shadow_size, task=attempt.task),
            messages=attempt.messages,
            end_user=None,
            created_at_s=created_at_s,
            total_ms=(time.perf_counter() - began) * 1000,
        )
        log.info("sampled %d shadow siblings of %s", len(result.choices), attempt.trajectory_id)
        return True

    async def _unless_app_requests(self, sampling: Awaitable[PromptResult | None]) -> PromptResult | None:
        """Return the answers; None if a request of an app arrived meanwhile, which then has vLLM to itself."""
        task = asyncio.ensure_future(sampling)
        try:
            while not task.done() and self._quiet_since_s() is not None:
                await asyncio.wait((task,), timeout=0.02)
            return task.result() if task.done() else None
        finally:
            task.cancel()


def _request(attempt: Attempt, learning: RewardSettings, max_model_len: int | None) -> TextRequest | None:
    """Return a request for siblings of the attempt's last turn; None if its prompt leaves no room for an answer, or if
    siblings would not be sampled as the attempt would have been at another temperature than 0."""
    given = attempt.sampling
    most = whole(given.get("max_completion_tokens")) or whole(given.get("max_tokens")) or DEFAULT_MAX_TOKENS
    if max_model_len is not None:
        most = min(most, max_model_len - len(attempt.prompt_token_ids))
    if most < 1:
        return None
    sampling = {name: given[name] for name in ("temperature", "stop") if given.get(name) is not None}
    if attempt.explored is not None:
        sampling["temperature"] = attempt.explored
    elif sampling.get("temperature") == 0:
        explored = learning.explore.temperature
        chat = ChatRequest(Body({name: raw(value) for name, value in given.items()}, dict(given), attempt.policy))
        if explored is None or not chat.explore(explored) or chat.constraints() is not None:
            return None
        sampling["temperature"] = explored
    size = learning.shadow_size
    values = {"model": attempt.policy, "prompt": attempt.prompt_token_ids, "n": size, "max_tokens": most} | sampling
    return TextRequest(Body({name: raw(value) for name, value in values.items()}, values, attempt.policy))
