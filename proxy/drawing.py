"""Answers that no app waits for, drawn behind all that apps ask. Knows vLLM's priorities; records nothing."""

import msgspec

from proxy.address import Address
from proxy.call import Call
from proxy.errors import UpstreamDown
from proxy.policies import Speaker
from proxy.upstream import Answering, Request
from proxy.wire.dialect import UNREADABLE, Asked, Heard, raw

PRIORITY = 1000
"""vLLM serves lower numbers first; an app's request has 0."""
MAX_WHY = 200
"""Characters of a refusal that are kept."""
MAX_BYTES = 64 * 2**20
"""Of an answer."""


class WillNotAnswer(Exception):
    """The model server refuses, however often it is asked. It may quote the prompt: this is for SQL, not for logs."""


class Stumbled(UpstreamDown):
    """The model server answers with an error of its own or what cannot be read: it may be this prompt's doing.

    Likewise not for logs.
    """


class Drawing:
    """Asks vLLM, in the name of a project."""

    def __init__(self, project: str, vllm: Answering) -> None:
        self._project = project
        self._vllm = vllm
        self._takes_priority = True

    async def draw(self, asked: Asked, speaker: Speaker, call_id: str) -> Heard:
        """What is said to the one prompt of `asked`.

        Raises:
            UpstreamDown: it cannot be asked now.
            Stumbled: likewise, or what it answers cannot be read.
            WillNotAnswer: it refuses.
        """
        behind = self._takes_priority  # another draw may find out meanwhile
        status, said = await self._post(asked, speaker, call_id, behind=behind)
        if status == 400 and behind:
            # A server that serves first come first (no `--scheduling-policy priority`) refuses the field.
            status, said = await self._post(asked, speaker, call_id, behind=False)
            if status != 400:
                self._takes_priority = False
        if status != 200:
            why = f"the model server refuses: {status} {said[:MAX_WHY].decode('utf-8', 'replace')}"
            raise WillNotAnswer(why) if status in (400, 422) else Stumbled(why)
        try:
            return asked.read(said).heard[0]
        except UNREADABLE as error:
            raise Stumbled(f"what the model server says cannot be read: {error}") from error

    async def _post(self, asked: Asked, speaker: Speaker, call_id: str, *, behind: bool) -> tuple[int, bytes]:
        body = asked.for_upstream(speaker.served_name, self._project)
        if behind:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            body = msgspec.json.encode({**fields, "priority": raw(PRIORITY)})
        request = Request(asked.path, body, call_id, speaker.served_name, call_id)
        with await self._vllm.ask(lambda: request) as response:
            return response.status, await response.read(MAX_BYTES)


def drawn(
    asked: Asked,
    speaker: Speaker,
    heard: Heard,
    *,
    project: str,
    call_id: str,
    trajectory_id: str,
    by: str,
    address: Address,
    messages: list[msgspec.Raw],
    end_user: str | None,
    created_at_s: float,
    total_ms: float,
) -> Call:
    """What was drawn, as a call to be recorded. `by`: the rule that found its trajectory."""
    return Call(
        id=call_id,
        project=project,
        policy=speaker.policy,
        policy_version=speaker.version,
        endpoint=asked.endpoint,
        streamed=False,
        status="complete",
        error=None,
        trajectory_id=trajectory_id,
        threaded_by=by,
        address=address,
        end_user=end_user,
        messages=messages,
        tools_or_null=asked.tools_or_null,
        sampling=msgspec.Raw(asked.sampling()),
        bent=asked.why_not_trained(),
        prompt_token_ids=heard.prompt_token_ids,
        prompt_tokens=heard.prompt_tokens,
        choices=heard.choices,
        created_at_s=created_at_s,
        ttft_ms=None,
        total_ms=total_ms,
    )
