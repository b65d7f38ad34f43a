"""One call on its way: who asked what, who answers, since when; and the frozen Calls it ends as. No I/O."""

import time
from collections.abc import Sequence

import msgspec

from proxy.address import Address
from proxy.asgi import Header, headers_in
from proxy.call import Call, Choice, History, Status
from proxy.history import BEGINNING, Conversation, Normaliser, prompt_hash
from proxy.policies import Speaker
from proxy.redaction import Redactor
from proxy.repeats import Question, digest_of
from proxy.threads import Place
from proxy.wire.dialect import Asked, Heard
from whetstone.ids import new_id
from whetstone.keys import Principal
from whetstone.privacy import pseudonym

MAX_END_USER = 256
"""Characters of a user's name; of a longer one, which no index could hold, the hash stands for it."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """What a call ended as."""

    status: Status
    heard: Sequence[Heard]
    answer_id: str | None
    """The id the app holds; None where nothing was answered."""
    error: str | None = None
    """What went wrong."""
    reply: bytes | None = None
    """The whole answer as it was sent, where it may be asked for again."""

    @property
    def tokens(self) -> tuple[int | None, int | None]:
        """Of the prompts and of the answers; None where the server did not tell."""
        read = [one.prompt_tokens for one in self.heard]
        said = [choice.token_ids for one in self.heard for choice in one.choices]
        return (
            sum(count for count in read if count is not None) if any(count is not None for count in read) else None,
            sum(len(ids) for ids in said if ids is not None) if any(ids is not None for ids in said) else None,
        )

    @property
    def finish_reasons(self) -> list[str]:
        """Why each choice ends, of those that do."""
        choices = (choice for one in self.heard for choice in one.choices)
        return [choice.finish_reason for choice in choices if choice.finish_reason is not None]


class Told(msgspec.Struct, frozen=True, gc=False):
    """What the request alone tells for its record."""

    sampling: msgspec.Raw
    bent: str | None
    end_user: str | None
    prompt_hash: str
    """Of its whole conversation."""


class Turn(msgspec.Struct):
    """One call on its way."""

    project: str
    id: str
    asked: Asked
    address: Address
    normaliser: Normaliser
    principal: Principal | None
    """Who asks, by its key; None where none was looked for."""
    key_id: str | None
    """The key that asked; None where none was needed."""
    owner: str | None
    """Who goes on with its conversation (`owner_of`)."""
    speaker: Speaker
    """Who answers; until its place is known, who would answer a new trajectory."""
    question: Question
    created_at_s: float
    began: float
    redactor: Redactor | None = None
    """Takes out what is not to be written down; None: nothing is."""
    place: Place | None = None
    """Where it belongs; None until it is about to be answered."""
    ttft_ms: float | None = None
    """Milliseconds to the first event; None until it was sent."""
    recorded: bool = False
    dropped: bool = False
    """Nobody could record it, and it is answered all the same."""
    sent: list[bytes] | None = None
    """What went out, where it may be asked for again."""
    server: tuple[str, int] | None = None
    """Host and port of who answers; None until somebody does."""
    ended: Ended | None = None
    """What it ended as; None until it was recorded."""
    trace_headers: dict[str, str] = {}
    """What the server that answers is to go on from, where calls are traced."""
    known_digest: str | None = None
    """See `digest`."""
    known_conversation: Conversation | None = None
    """See `conversation`."""
    told: Told | None = None
    """See `prepare`."""

    @property
    def digest(self) -> str:
        """Hash of the request. Few need it: those that may be asked again, and what they asked before."""
        if self.known_digest is None:
            self.known_digest = digest_of(self.question)
        return self.known_digest

    @property
    def conversation(self) -> Conversation:
        """Its conversation as hashes. Of one that begins nobody needs them before the server is asked."""
        known = self.known_conversation
        if known is None:
            known = self.known_conversation = self.normaliser.conversation(self.asked.conversation, self.owner)
        return known

    def goes_on_from(self) -> Conversation:
        """The same where it may go on from an answer; else BEGINNING, which takes no reading."""
        return self.conversation if self.asked.goes_on() else BEGINNING

    def headers(self) -> list[Header]:
        """What the answer says about itself."""
        return headers_in(self.header_lines())

    def header_lines(self) -> bytes:
        """`headers` as `send_whole` takes them soonest. No value has a line break: all are ids, or words of ours."""
        place = self.place
        assert place is not None
        said = (
            f"x-completion-id: {self.id}\r\nx-trajectory-id: {place.trajectory_id}\r\n"
            f"x-policy-version: {self.speaker.version}\r\nx-threaded-by: {place.by}\r\n"
        )
        if self.address.group_id is not None:
            said += f"x-group-id: {self.address.group_id}\r\n"
        if self.dropped:
            said += "x-whetstone-recorded: false\r\n"
        return said.encode()

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return (time.perf_counter() - self.began) * 1000

    def prepare(self) -> None:
        """Have ready what its record needs and its answer does not tell. Best done while the server works."""
        if self.told is None:
            self.told = self._told()

    def _told(self) -> Told:
        asked = self.asked
        end_user = asked.end_user
        if end_user is not None and len(end_user) > MAX_END_USER:
            end_user = pseudonym(end_user)
        prompt = prompt_hash(self.conversation, asked.tools_or_null, self.address.task)
        return Told(msgspec.Raw(asked.sampling()), asked.why_not_trained(), end_user, prompt)

    def calls(self, ended: Ended) -> list[Call]:
        """What to record, before anything is redacted: a call for each prompt, the first under the turn's own id."""
        asked, address, place, total_ms = self.asked, self.address, self.place, self.elapsed_ms()
        assert place is not None
        status, heard, speaker = ended.status, ended.heard, self.speaker
        messages, alone = asked.messages, len(heard) == 1
        keeps_digest = address.retry or address.turn_key is not None or status != "complete"
        tools, told = asked.tools_or_null, self.told or self._told()
        said = []
        for one in heard:
            first = one.prompt == 0
            conversation = self.conversation if alone else self._prompt(messages[one.prompt])
            # In the order of its fields: by name it takes twice as long.
            call = Call(
                self.id if first else new_id(),
                self.project,
                speaker.policy,
                speaker.version,
                asked.endpoint,
                asked.stream,
                status,
                ended.error,
                place.trajectory_id,
                place.by,
                address,
                told.end_user,
                messages if alone else messages[one.prompt : one.prompt + 1],
                tools,
                told.sampling,
                told.bent,
                one.prompt_token_ids,
                one.prompt_tokens,
                one.choices,
                self.created_at_s,
                self.ttft_ms,
                total_ms,
                ended.answer_id,
                "" if first else self.id,
                self.digest if keeps_digest and first else None,
                ended.reply if first else None,
                place.extends,
                place.continues,
                told.prompt_hash if alone else prompt_hash(conversation, tools, address.task),
                self.key_id,
                self._histories(conversation, one.choices),
            )
            said.append(call)
        return said

    def _histories(self, conversation: Conversation, choices: Sequence[Choice]) -> tuple[History, ...]:
        if len(choices) == 1:
            return (self.normaliser.history(conversation, choices[0]),)
        return tuple([self.normaliser.history(conversation, choice) for choice in choices])

    def _prompt(self, message: msgspec.Raw) -> Conversation:
        return self.normaliser.conversation([message], self.owner)


def owner_of(key_id: str | None, end_user: str | None) -> str | None:
    """What two calls share of which one may go on with the other's conversation: the key, and whom its app serves."""
    return end_user if key_id is None else f"{key_id}\0{end_user or ''}"
