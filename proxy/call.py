"""One served call, frozen: what goes into the journal and from there into SQL. Values only."""

import math
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from proxy.address import Address

NULL = msgspec.Raw(b"null")
Status = Literal["complete", "aborted", "error"]


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one choice of a call said. None: vLLM did not tell."""

    index: int
    message: dict[str, Any]
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    sampled: int | None = None
    """How many tokens there were, where their ids are not kept."""
    text_of_parts: str | None = msgspec.field(name="text", default=None)
    """What a message of parts says, where its dialect knows."""

    @property
    def text(self) -> str | None:
        """What it says, as text; None where that is no text."""
        content = self.message.get("content")
        return content if isinstance(content, str) else self.text_of_parts

    @property
    def text_beside(self) -> str | None:
        """Its text where the message does not have it as its content; None where it has, or there is none."""
        return None if isinstance(self.message.get("content"), str) else self.text_of_parts

    @property
    def tokens(self) -> int | None:
        """How many tokens were sampled."""
        return self.sampled if self.token_ids is None else len(self.token_ids)


def nothing_said(index: int) -> Choice:
    """A choice that came to nothing."""
    return Choice(index=index, message={})


class History(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a completion leaves to be found by. None: nothing extends it, or it made no tool call."""

    conversation: bytes | None = None
    tool_calls: bytes | None = None

    @property
    def found_by(self) -> tuple[bytes, ...]:
        """Those that are there."""
        if self.tool_calls is None:
            return () if self.conversation is None else (self.conversation,)
        return (self.tool_calls,) if self.conversation is None else (self.conversation, self.tool_calls)


NO_HISTORY = History()


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A served call with all its choices."""

    id: str
    project: str
    policy: str
    policy_version: int
    endpoint: str
    streamed: bool
    status: Status
    error: str | None
    trajectory_id: str
    threaded_by: str
    address: Address
    end_user: str | None
    messages: list[msgspec.Raw]
    tools_or_null: msgspec.Raw
    """JSON null when it has none: msgspec decodes no optional Raw."""
    sampling: msgspec.Raw
    bent: str | None
    """Why its sampling cannot be trained on; None when it can."""
    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]
    created_at_s: float
    ttft_ms: float | None
    total_ms: float
    answer_id: str | None = None
    """The id the app holds, as the answer said it; None where nothing was answered."""
    first_id: str = ""
    """The id of the request's first choice, where it is another call's: its prompt is not the request's first."""
    request_digest: str | None = None
    """Hash of path and body; a retry's, or that of a call which was not answered whole."""
    reply: bytes | None = None
    """The answer as it was sent, where it may be asked for again."""
    extends: str | None = None
    """The completion of its trajectory that it goes on from, where the conversation says so."""
    continues: str | None = None
    """The completion of another trajectory that its own, a new one, goes on from."""
    prompt_hash: str | None = None
    """Of its conversation, tools and task."""
    key_id: str | None = None
    """The API key that asked; None where none was needed."""
    histories: tuple[History, ...] = ()
    """Of each choice, where it may be gone on from."""
    redactions: int | None = None
    """How many pieces of it were taken out; None where nobody looked."""
    withheld: bool = False
    """Some of them are of what the model read or said, and the ids that spell it are not there."""

    @property
    def tools(self) -> msgspec.Raw | None:
        """The request's tools, as they came."""
        return None if self.tools_or_null == NULL else self.tools_or_null

    @property
    def created_at(self) -> datetime:
        """When the request arrived."""
        return datetime.fromtimestamp(self.created_at_s, UTC)

    @property
    def upstream_id(self) -> str:
        """The id the app holds; without an answer, what vLLM would have made of ours."""
        return self.answer_id or f"chatcmpl-{self.id}"

    @property
    def tokens(self) -> int:
        """Those of its prompt and those sampled, as far as vLLM told."""
        return self.read_tokens + self.sampled_tokens

    @property
    def read_tokens(self) -> int:
        """Those of its prompt, likewise."""
        return self.prompt_tokens or len(self.prompt_token_ids or ())

    @property
    def sampled_tokens(self) -> int:
        """Those of all its choices, likewise."""
        if len(self.choices) == 1:
            return self.choices[0].tokens or 0
        return sum([choice.tokens or 0 for choice in self.choices])

    def completion_id(self, choice: Choice) -> str:
        """The request's first choice carries its call's id, a further one its place behind that."""
        first = self.first_id or self.id
        return first if choice.index == 0 else f"{first}.{choice.index}"

    @property
    def siblings(self) -> str:
        """How the ids of its siblings and of their group begin: a later turn's are no siblings of the first one's."""
        return self.trajectory_id if self.extends is None else self.id

    def trajectory_of(self, choice: Choice) -> str:
        """The first choice continues the trajectory, each further one opens a sibling."""
        return self.trajectory_id if choice.index == 0 else f"{self.siblings}.{choice.index}"

    def history(self, choice: Choice) -> History:
        """By what a choice may be gone on from."""
        for place, one in enumerate(self.choices):
            if one is choice and place < len(self.histories):
                return self.histories[place]
        return NO_HISTORY

    def why_not_trained(self, choice: Choice) -> str | None:
        """What this choice lacks to be trained on; None when nothing."""
        if self.status != "complete":
            return self.status
        if self.withheld:
            return "redacted"
        if self.bent:
            return self.bent
        if not self.prompt_token_ids or not choice.token_ids:
            return "no_token_ids"
        if choice.logprobs is None or len(choice.logprobs) != len(choice.token_ids):
            return "no_logprobs"
        # -9999.0 is vLLM's minus infinity: a probability nobody measured. What is not finite makes the sum so.
        if not (min(choice.logprobs) > -9999.0 and math.isfinite(sum(choice.logprobs))):
            return "no_logprobs"
        return None
