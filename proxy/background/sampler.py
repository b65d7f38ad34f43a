"""Sample answers that no app waits for, with lower priority than the apps' requests."""

from collections.abc import Callable

import msgspec

from proxy.domain.address import Address
from proxy.domain.call import Call
from proxy.domain.policies import ServedVersion
from proxy.errors import UpstreamDown
from proxy.upstream.server import Answering, Request
from proxy.wire.decoding import raw
from proxy.wire.interfaces import UNREADABLE, DialectRequest, PromptResult

PRIORITY = 1000
"""vLLM serves lower numbers first; an app's request has 0."""
MAX_WHY = 200
"""Most characters of a refusal that are stored."""
MAX_BYTES = 64 * 2**20
"""Most bytes of an answer."""


class PromptRejected(Exception):
    """The model server rejects the prompt; a retry cannot succeed. The message may quote the prompt: store it in SQL,
    do not log it."""


class SampleFailed(UpstreamDown):
    """The model server failed, or its answer cannot be read; this prompt may be the cause.

    Do not log the message: it may quote the prompt.
    """


class BackgroundSampler:
    """Sends requests to vLLM on behalf of a project, and records the answers that its callers want."""

    def __init__(self, project: str, vllm: Answering, record: Callable[[Call], None]) -> None:
        self._project = project
        self._vllm = vllm
        self._record = record
        self._takes_priority = True

    async def draw(self, request: DialectRequest, served_version: ServedVersion, call_id: str) -> PromptResult:
        """Return the answer to the single prompt of `request`.

        Raises:
            UpstreamDown: vLLM is not available now.
            SampleFailed: vLLM failed, or its answer cannot be read.
            PromptRejected: vLLM rejects the prompt.
        """
        behind = self._takes_priority  # another sample may change it meanwhile
        status, content = await self._post(request, served_version, call_id, behind=behind)
        if status == 400 and behind:
            # A server without `--scheduling-policy priority` (first come, first served) rejects the field.
            status, content = await self._post(request, served_version, call_id, behind=False)
            if status != 400:
                self._takes_priority = False
        if status != 200:
            failure = PromptRejected if status in (400, 422) else SampleFailed
            raise failure(f"the model server refuses: {status} {content[:MAX_WHY].decode('utf-8', 'replace')}")
        try:
            return request.read(content).results[0]
        except UNREADABLE as error:
            raise SampleFailed(f"the response of the model server cannot be read: {error}") from error

    async def _post(
        self, request: DialectRequest, served_version: ServedVersion, call_id: str, *, behind: bool
    ) -> tuple[int, bytes]:
        body = request.to_upstream_body(served_version.served_name, self._project)
        if behind:
            body = msgspec.json.encode(
                {**msgspec.json.decode(body, type=dict[str, msgspec.Raw]), "priority": raw(PRIORITY)}
            )
        upstream_request = Request(request.path, body, call_id, served_version.served_name, call_id)
        with await self._vllm.ask(lambda: upstream_request) as response:
            return response.status, await response.read(MAX_BYTES)

    def record(
        self,
        request: DialectRequest,
        served_version: ServedVersion,
        result: PromptResult,
        *,
        call_id: str,
        trajectory_id: str,
        by: str,
        address: Address,
        messages: list[msgspec.Raw],
        end_user: str | None,
        created_at_s: float,
        total_ms: float,
    ) -> None:
        """Record the sampled answers as a call. `by`: the rule that assigned its trajectory."""
        self._record(
            Call(
                id=call_id,
                project=self._project,
                policy=served_version.policy,
                policy_version=served_version.version,
                endpoint=request.endpoint,
                streamed=False,
                status="complete",
                error=None,
                trajectory_id=trajectory_id,
                threaded_by=by,
                address=address,
                end_user=end_user,
                messages=messages,
                tools_or_null=request.tools_or_null,
                sampling=msgspec.Raw(request.sampling()),
                bent=request.why_not_trained(),
                constraints=request.constraints(),
                prompt_token_ids=result.prompt_token_ids,
                prompt_tokens=result.prompt_tokens,
                choices=result.choices,
                created_at_s=created_at_s,
                ttft_ms=None,
                total_ms=total_ms,
            )
        )
