"""One call on its way: who asked what, who answers, since when; and the frozen Calls it ends as. No I/O."""

import hashlib
import time
from collections.abc import Sequence

import msgspec

from proxy.address import Address
from proxy.asgi import Header
from proxy.call import Call, Status
from proxy.history import Conversation, Normaliser, prompt_hash
from proxy.policies import Speaker
from proxy.threads import Place
from proxy.wire.dialect import Asked, Heard
from whetstone.ids import new_id

MAX_END_USER = 256
"""Characters of a user's name; of a longer one, which no index could hold, the hash stands for it."""


class Turn(msgspec.Struct):
    """One call on its way."""

    project: str
    id: str
    asked: Asked
    address: Address
    normaliser: Normaliser
    conversation: Conversation
    speaker: Speaker
    digest: str
    """Hash of the request: path and body."""
    created_at_s: float
    began: float
    place: Place | None = None
    """Where it belongs; None until it is about to be answered."""
    ttft_ms: float | None = None
    """Milliseconds to the first event; None until it was sent."""
    recorded: bool = False
    sent: list[bytes] | None = None
    """What went out, where it may be asked for again."""

    def headers(self) -> list[Header]:
        """What the answer says about itself."""
        place = self.placed
        headers = [
            (b"x-completion-id", self.id.encode()),
            (b"x-trajectory-id", place.trajectory_id.encode()),
            (b"x-policy-version", str(self.speaker.version).encode()),
            (b"x-threaded-by", place.by.encode()),
        ]
        if self.address.group_id is not None:
            headers.append((b"x-group-id", self.address.group_id.encode()))
        return headers

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return (time.perf_counter() - self.began) * 1000

    def calls(
        self,
        status: Status,
        heard: Sequence[Heard],
        answer_id: str | None,
        error: str | None,
        reply: bytes | None,
    ) -> list[Call]:
        """What to record: a call for each prompt, the first under the turn's own id."""
        messages = self.asked.messages
        place = self.placed
        alone = len(heard) == 1
        may_be_a_retry = self.address.retry or self.address.turn_key is not None
        keeps_digest = may_be_a_retry or status != "complete"
        sampling, bent = msgspec.Raw(self.asked.sampling()), self.asked.why_not_trained()
        tools, total_ms = self.asked.tools_or_null, self.elapsed_ms()
        end_user = self.asked.end_user
        if end_user is not None and len(end_user) > MAX_END_USER:
            end_user = hashlib.sha256(end_user.encode("utf-8", "replace")).hexdigest()
        return [
            Call(
                id=self.id if one.prompt == 0 else new_id(),
                project=self.project,
                policy=self.speaker.policy,
                policy_version=self.speaker.version,
                endpoint=self.asked.endpoint,
                streamed=self.asked.stream,
                status=status,
                error=error,
                trajectory_id=place.trajectory_id,
                threaded_by=place.by,
                address=self.address,
                end_user=end_user,
                messages=messages if alone else messages[one.prompt : one.prompt + 1],
                tools_or_null=tools,
                sampling=sampling,
                bent=bent,
                prompt_token_ids=one.prompt_token_ids,
                prompt_tokens=one.prompt_tokens,
                choices=one.choices,
                created_at_s=self.created_at_s,
                ttft_ms=self.ttft_ms,
                total_ms=total_ms,
                answer_id=answer_id,
                first_id="" if one.prompt == 0 else self.id,
                request_digest=self.digest if keeps_digest and one.prompt == 0 else None,
                reply=reply if one.prompt == 0 else None,
                extends=place.extends,
                continues=place.continues,
                prompt_hash=prompt_hash(conversation, tools, self.address.task),
                histories=tuple(self.normaliser.history(conversation, choice) for choice in one.choices),
            )
            for one in heard
            for conversation in (self.conversation if alone else self._prompt(messages[one.prompt]),)
        ]

    @property
    def placed(self) -> Place:
        """Where it belongs.

        Raises:
            RuntimeError: nobody has looked yet.
        """
        if self.place is None:
            raise RuntimeError(f"call {self.id} has no place yet")
        return self.place

    def _prompt(self, message: msgspec.Raw) -> Conversation:
        return self.normaliser.conversation([message], self.asked.end_user)


def digest_of(path: str, body: bytes) -> str:
    """What two requests share that ask the same."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
