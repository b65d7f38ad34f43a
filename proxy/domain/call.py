"""Define a served call as an immutable value: what goes into the journal, and from there into SQL.

`digest_of` decides when two requests are the same, to recognise a client's retry.
"""

import hashlib
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from proxy.domain.address import Address
from whetstone.domain.conversation_hash import has_random_end
from whetstone.domain.ids import ID

NULL = msgspec.Raw(b"null")
WINDOW_S = 15 * 60
"""Longest time between a request and its retry; the official clients give up after seconds."""
_EMPTY = hashlib.sha256()
"""Copied for each digest: looking the algorithm up takes longer than hashing."""
Question = tuple[str, bytes, str | None]
"""What identifies a request: path, body, key."""

Status = Literal["complete", "aborted", "error"]


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice of a call's answer. None: vLLM did not report it."""

    index: int
    message: dict[str, Any]
    """Empty if the prompt got no answer."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    sampled: int | None = None
    """Number of tokens, where their ids are not stored."""
    text_of_parts: str | None = msgspec.field(name="text", default=None)
    """The text of a message that consists of parts, if its dialect can read it."""

    @property
    def text(self) -> str | None:
        """The choice's text, or None if it has none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else self.text_of_parts

    @property
    def text_beside(self) -> str | None:
        """The choice's text if the message does not have it as its content, else None."""
        return None if isinstance(self.message.get("content"), str) else self.text_of_parts

    @property
    def tokens(self) -> int | None:
        """Number of sampled tokens."""
        return self.sampled if self.token_ids is None else len(self.token_ids)

    @property
    def inner_ids(self) -> Iterable[str]:
        """The ids in its message that occur in it only: of its tool calls, and of its items and blocks."""
        calls, content = self.message.get("tool_calls"), self.message.get("content")
        if not calls and not isinstance(content, list):  # as in nearly all messages
            return ()
        parts = (part for part in (calls, content) if isinstance(part, list))
        pieces = [piece for part in parts for piece in part if isinstance(piece, dict)]
        values = [piece.get(name) for piece in pieces for name in ("id", "call_id")]
        return dict.fromkeys(
            value for value in values if isinstance(value, str) and ID.fullmatch(value) and has_random_end(value)
        )


class ContinuationKeys(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Hashes by which a later request finds the completion that it continues. None: nothing extends it, or it made no
    tool call."""

    conversation: bytes | None = None
    tool_calls: bytes | None = None

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """The hashes that exist."""
        if self.tool_calls is None:
            return () if self.conversation is None else (self.conversation,)
        return (self.tool_calls,) if self.conversation is None else (self.conversation, self.tool_calls)


NO_KEYS = ContinuationKeys()


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
    """JSON null if it has none: msgspec does not decode an optional Raw."""
    sampling: msgspec.Raw
    bent: str | None
    """Why its sampling cannot be trained on; None if it can."""
    prompt_token_ids: list[int] | None
    prompt_tokens: int | None
    choices: tuple[Choice, ...]
    created_at_s: float
    ttft_ms: float | None
    total_ms: float
    answer_id: str | None = None
    """The id in the answer, as the app sees it; None if nothing was answered."""
    first_id: str = ""
    """The id of the request's first choice, if that is another call's: this call's prompt is not the request's
    first."""
    request_digest: str | None = None
    """Hash of path and body. Set for a retry, for a call with a turn key, and for one that was not answered whole."""
    reply: bytes | None = None
    """The answer as it was sent, if it may be requested again."""
    extends: str | None = None
    """The completion of its own trajectory that it continues, if the conversation shows it."""
    continues: str | None = None
    """The completion of another trajectory that this call's new trajectory continues."""
    prompt_hash: str | None = None
    """Hash of its conversation, tools and task."""
    key_id: str | None = None
    """The API key that the request came with; None if none was needed."""
    histories: tuple[ContinuationKeys, ...] = ()
    """One for each choice, if it may be continued."""
    constraints: dict[str, Any] | None = None
    """What bends the distribution that its tokens were sampled from, in vLLM's names; None: nothing does."""
    explored: float | None = None
    """The temperature that its policy explored with instead of 0; None if it did not explore."""
    stored: dict[str, Any] | None = None
    """What the record lacks to give the answer again by its id; None if no request may ask for that."""
    redactions: int | None = None
    """Number of pieces that were redacted; None if redaction did not run."""
    withheld: bool = False
    """Some of the redacted pieces are in the prompt or the answer, and the token ids that spell them were removed."""

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
        """The id in the answer; without an answer, the one that vLLM would have made of our id."""
        return self.answer_id or f"chatcmpl-{self.id}"

    @property
    def tokens(self) -> int:
        """Number of prompt tokens and sampled tokens, as far as vLLM reported them."""
        return self.read_tokens + self.sampled_tokens

    @property
    def read_tokens(self) -> int:
        """Number of prompt tokens, as far as vLLM reported it."""
        return self.prompt_tokens or len(self.prompt_token_ids or ())

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens in all choices, as far as vLLM reported them."""
        if len(self.choices) == 1:
            return self.choices[0].tokens or 0
        return sum([choice.tokens or 0 for choice in self.choices])

    def completion_id(self, choice: Choice) -> str:
        """Return a choice's completion id: the first choice has its call's id, the others append their index."""
        first = self.first_id or self.id
        return first if choice.index == 0 else f"{first}.{choice.index}"

    @property
    def siblings(self) -> str:
        """Prefix of the ids of its siblings and of their group. A later turn's siblings must not become the first
        turn's."""
        return self.trajectory_id if self.extends is None else self.id

    def trajectory_of(self, choice: Choice) -> str:
        """Return a choice's trajectory: the first choice continues the call's, each other one opens a sibling."""
        return self.trajectory_id if choice.index == 0 else f"{self.siblings}.{choice.index}"

    def history(self, choice: Choice) -> ContinuationKeys:
        """Return the hashes by which a choice may be continued."""
        for place, one in enumerate(self.choices):
            if one is choice and place < len(self.histories):
                return self.histories[place]
        return NO_KEYS

    def why_not_trained(self, choice: Choice) -> str | None:
        """Return why this choice cannot be trained on, or None if it can."""
        if self.status != "complete":
            return self.status
        if self.withheld:
            return "redacted"
        if self.bent:
            return self.bent
        if not self.prompt_token_ids or not choice.token_ids:
            return "no_token_ids"
        logprobs = choice.logprobs
        if logprobs is None or len(logprobs) != len(choice.token_ids):
            return "no_logprobs"
        # -9999.0 is vLLM's minus infinity: a probability that was not measured. A value that is not finite makes the
        # sum so.
        return None if min(logprobs) > -9999.0 and math.isfinite(sum(logprobs)) else "no_logprobs"


def digest_of(question: Question) -> str:
    """Return the hash of a request; it remains when the body is gone."""
    path, body, key_id = question
    made = _EMPTY.copy()
    made.update(f"{path}\0{key_id or ''}\0".encode() + body)
    return made.hexdigest()
