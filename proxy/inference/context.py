"""Hold the state of one call while it is served, and build the Calls to record at its end. No I/O."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from proxy.domain.address import Address
from proxy.domain.call import Call, Question, Status, digest_of
from proxy.domain.feedback import TOKEN_HEADER
from proxy.domain.policies import Handover, ServedVersion
from proxy.http.asgi import Header, headers_in
from proxy.recording.redaction import Redactor
from proxy.trajectories.conversation_hash import BEGINNING, Conversation, ConversationHasher, prompt_hash
from proxy.trajectories.resolver import Placement
from proxy.wire.interfaces import DialectRequest, PromptResult
from whetstone.config.privacy import pseudonym
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import new_id

MAX_END_USER = 256
"""Most characters of an end user's name; a longer name would fit in no index, so its hash is stored."""


class CallResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a call."""

    status: Status
    results: Sequence[PromptResult]
    answer_id: str | None
    """The id that the app received; None if nothing was answered."""
    error: str | None = None
    """The error message."""
    reply: bytes | None = None
    """The whole answer as it was sent, if the client may retry it."""
    stored: dict[str, Any] | None = None
    """What the record lacks to give the answer again by its id; None if no request may ask for that."""

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """Return the tokens of the prompts and of the answers; None where the server reported none."""
        read = [one.prompt_tokens for one in self.results if one.prompt_tokens is not None]
        choices = [choice for one in self.results for choice in one.choices]
        sampled = [len(choice.token_ids) for choice in choices if choice.token_ids is not None]
        if not sampled:
            sampled = [one.answer_tokens for one in self.results if one.answer_tokens is not None]
        return sum(read) if read else None, sum(sampled) if sampled else None

    @property
    def finish_reasons(self) -> list[str]:
        """Return the finish reason of each choice that has one."""
        reasons = (choice.finish_reason for one in self.results for choice in one.choices)
        return [reason for reason in reasons if reason is not None]


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """The fields of the record that depend on the request only."""

    sampling: msgspec.Raw
    bent: str | None
    constraints: dict[str, Any] | None
    end_user: str | None
    prompt_hash: str
    """Hash of the request's whole conversation."""


class CallContext(msgspec.Struct):
    """One call while it is served."""

    project: str
    id: str
    request: DialectRequest
    address: Address
    hasher: ConversationHasher
    principal: Principal | None
    """Whose key the request has; None if no key was checked."""
    key_id: str | None
    """Id of the request's key; None if none was needed."""
    owner: str | None
    """Key and end user that a call must have to continue its conversation (`owner_of`)."""
    speaker: ServedVersion
    """The version that answers; until the call is placed, the one that would answer a new trajectory."""
    question: Question
    created_at_s: float
    began: float
    redactor: Redactor | None = None
    """Removes what must not be stored; None: nothing is removed."""
    sign_feedback: Callable[[str | None, str], str] | None = None
    """Makes a feedback token from the ids of key and completion; None: answers have none."""
    place: Placement | None = None
    """Its trajectory; None until shortly before the request is sent."""
    ttft_ms: float | None = None
    """Milliseconds to the first event; None until it was sent."""
    recorded: bool = False
    dropped: bool = False
    """Whether the call is answered although it could not be recorded."""
    sent: list[bytes] | None = None
    """What was sent to the app, if the client may retry it."""
    server: tuple[str, int] | None = None
    """Host and port of the server that answers; None until one does."""
    result: CallResult | None = None
    """Its result; None until it was recorded."""
    trace_headers: dict[str, str] = {}
    """Trace headers for the server that answers, if calls are traced."""
    known_digest: str | None = None
    """See `digest`."""
    known_conversation: Conversation | None = None
    """See `conversation`."""
    handover: Handover | None = None
    """How its policy takes over from a teacher; None: it does not, or one version was requested."""
    for_teacher: Callable[[], DialectRequest] | None = None
    """Reads the request as the teacher gets it; None without a handover."""
    teacher: str | None = None
    """The policy that answers in place of the requested one; None: that one answers itself."""
    explored: float | None = None
    """The temperature that its policy explores with instead of 0; None: it does not."""
    facts: RequestFacts | None = None
    """See `prepare_record`."""

    @property
    def digest(self) -> str:
        """Return the hash of the request. Only calls that may be retried, and retries, need it."""
        if self.known_digest is None:
            self.known_digest = digest_of(self.question)
        return self.known_digest

    @property
    def conversation(self) -> Conversation:
        """Return its conversation as hashes. A call that begins a conversation does not need them before the request
        is sent."""
        if self.known_conversation is None:
            self.known_conversation = self.hasher.conversation(self.request.conversation, self.owner)
        return self.known_conversation

    def continued_conversation(self) -> Conversation:
        """Return `conversation` if the request may continue an answer; else BEGINNING, which needs no hashing."""
        return self.conversation if self.request.may_continue() else BEGINNING

    def headers(self) -> list[Header]:
        """Return the response headers that describe the call."""
        return headers_in(self.header_lines())

    def header_lines(self) -> bytes:
        """Return `headers` in the form that `send_whole` sends fastest. No value has a line break: each is an id or a
        fixed word."""
        place = self.place
        assert place is not None
        lines = (
            f"x-completion-id: {self.id}\r\nx-trajectory-id: {place.trajectory_id}\r\n"
            f"x-policy-version: {self.speaker.version}\r\nx-threaded-by: {place.by}\r\n"
        )
        if self.address.group_id is not None:
            lines += f"x-group-id: {self.address.group_id}\r\n"
        if self.explored is not None:
            lines += f"x-explored: {self.explored:g}\r\n"
        if self.dropped:
            lines += "x-whetstone-recorded: false\r\n"
        elif self.sign_feedback is not None:
            lines += f"{TOKEN_HEADER.decode()}: {self.sign_feedback(self.key_id, self.id)}\r\n"
        return lines.encode()

    def stored_headers(self) -> list[Header]:
        """Return `headers` without the feedback token, which is a credential and expires."""
        return [header for header in self.headers() if header[0] != TOKEN_HEADER]

    def token_headers(self, stored: Sequence[Header]) -> list[Header]:
        """Return the feedback token that belongs to an answer which is sent again, by its stored headers."""
        completion_id = dict(stored).get(b"x-completion-id")
        if self.sign_feedback is None or completion_id is None:
            return []
        return [(TOKEN_HEADER, self.sign_feedback(self.key_id, completion_id.decode()).encode())]

    def elapsed_ms(self) -> float:
        """Return milliseconds since the request arrived."""
        return (time.perf_counter() - self.began) * 1000

    def prepare_record(self) -> RequestFacts:
        """Return the parts of the record that do not depend on the answer. Best computed while the server works."""
        if self.facts is None:
            request, end_user = self.request, self.request.end_user
            if end_user is not None and len(end_user) > MAX_END_USER:
                end_user = pseudonym(end_user)
            prompt = prompt_hash(self.conversation, request.tools_or_null, self.address.task)
            sampling, constraints = msgspec.Raw(request.sampling()), request.constraints()
            self.facts = RequestFacts(sampling, request.why_not_trained(), constraints, end_user, prompt)
        return self.facts

    def calls(self, result: CallResult) -> list[Call]:
        """Return what to record, before redaction: one call for each prompt, the first with this call's own id."""
        request, address, place, total_ms = self.request, self.address, self.place, self.elapsed_ms()
        assert place is not None
        status, results, speaker = result.status, result.results, self.speaker
        messages, alone = request.messages, len(results) == 1
        keeps_digest = address.retry or address.turn_key is not None or status != "complete"
        tools, facts = request.tools_or_null, self.prepare_record()
        hasher, conversation = self.hasher, self.conversation
        calls = []
        for one in results:
            first = one.prompt == 0
            # Other servers return no ids, but the number of tokens.
            choices = one.choices if speaker.upstream is None else one.counted()
            if not alone:
                conversation = hasher.conversation([messages[one.prompt]], self.owner)
            # Positional arguments: with keywords this takes twice as long.
            calls.append(
                Call(
                    self.id if first else new_id(),
                    self.project,
                    speaker.policy,
                    speaker.version,
                    request.endpoint,
                    request.stream,
                    status,
                    result.error,
                    place.trajectory_id,
                    place.by,
                    address,
                    facts.end_user,
                    messages if alone else messages[one.prompt : one.prompt + 1],
                    tools,
                    facts.sampling,
                    facts.bent,
                    one.prompt_token_ids,
                    one.prompt_tokens,
                    choices,
                    self.created_at_s,
                    self.ttft_ms,
                    total_ms,
                    result.answer_id,
                    "" if first else self.id,
                    self.digest if keeps_digest and first else None,
                    result.reply if first else None,
                    place.extends,
                    place.continues,
                    facts.prompt_hash if alone else prompt_hash(conversation, tools, address.task),
                    self.key_id,
                    # One choice is by far the most frequent: no comprehension for it.
                    (hasher.history(conversation, choices[0]),)
                    if len(choices) == 1
                    else tuple([hasher.history(conversation, choice) for choice in choices]),
                    facts.constraints,
                    self.explored,
                    result.stored,
                )
            )
        return calls


def owner_of(key_id: str | None, end_user: str | None) -> str | None:
    """Return the key and end user; one call may continue another's conversation only if both have the same."""
    return end_user if key_id is None else f"{key_id}\0{end_user or ''}"
