"""Resolve which trajectory a request continues: explicit address first, then the prefix index in memory, then SQL.

A completion that a request may continue is a head. Its key is the hash of its conversation and answer. The call
that extends a head takes it; among heads with the same history it takes the oldest free one. If none is free, another
call continued it before: that is a fork, and a fork becomes a new trajectory that is linked to the completion it
branches from. The same holds for a continuation of a trajectory that has ended. Used from one event loop.

An app may rewrite an answer before it sends it back. So a prompt also continues the head whose whole prompt it begins
with, if what follows repeats that head's answer (`rewriting`) and no other's. Neither an equal prompt nor being the
only one is enough: a few-shot prompt may begin with the prompt of another call, and goes on with an example.

The placement also carries the versions that answered so far, so that the call may stay on one of them. If the
conversation matches, these are the versions up to the completion that the call continues (also for a fork and after an
end); otherwise all versions that answered in the trajectory. A trajectory that only reuses the name of an ended one is
a new attempt, in which no version has answered.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from proxy.domain.address import Address
from proxy.domain.call import WINDOW_S, Call, Question, digest_of
from proxy.domain.eviction import evict_oldest
from proxy.domain.policies import Pins, and_then
from proxy.trajectories.conversation_hash import Conversation
from proxy.trajectories.indexes import OpenCompletion, PrefixIndex, Repeatable, RetryTracker, TrajectoryState, name_of
from proxy.trajectories.peers import Peers
from proxy.trajectories.rewriting import MOST_CHARACTERS, AnswerMarks, Echo, Evidence, echo_since, evidence, marks_of
from proxy.trajectories.store import ThreadTables
from whetstone.domain.conversation_hash import prompt_of
from whetstone.domain.ids import new_id

MOST_HOPS = 1000
"""Most trajectories that may follow each other under one name."""
MOST_ALIKE, MOST_COMPARED = 1000, 64
"""Most heads with the same prompt that are looked at, and most open ones among them whose answers are compared with a
rewritten one, the latest heads each time. If there are more, only an id of the answer decides."""
_BEGINNINGS = ("new", "fork", "after")
"""Rules by which a call is the first of its trajectory."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """The trajectory of a call, and the rule that assigned it."""

    trajectory_id: str
    by: str
    """The rule, one of those in docs/whose_call.md."""
    extends: str | None = None
    """The completion of this trajectory that the call continues, if the conversation matches."""
    continues: str | None = None
    """The completion that a new trajectory continues."""
    pins: Pins = ()
    """The versions that answered up to there."""


class TrajectoryResolver:
    """Finds the trajectories of calls. Call `resolve` when a call arrives, and `on_recorded` or `on_discarded`
    when it ends."""

    def __init__(self, tables: ThreadTables, peers: Peers, idle_s: float, most_cached: int = 16_000) -> None:
        """Create a resolver.

        `idle_s`: a trajectory is over this many seconds after its last completion. `most_cached`: how many completions,
        and how many trajectories, stay in memory; older entries are looked up in SQL.
        """
        self._tables = tables
        self._peers = peers
        self._idle_s = idle_s
        self.placed: Counter[str] = Counter()
        """Number of calls by the rule that assigned their trajectory."""
        self._most_cached = most_cached
        self._heads = PrefixIndex(most_cached)
        self._trails: dict[str, TrajectoryState] = {}
        """Ordered by last use, the latest last."""
        self._running: RetryTracker[Question] = RetryTracker(most_cached)
        self._unanswered: RetryTracker[str] = RetryTracker(most_cached)
        self._absent: dict[bytes, None] = {}

    async def resolve(
        self, call_id: str, address: Address, conversation: Conversation, question: Question
    ) -> Placement:
        """Return the trajectory of a call that has just arrived."""
        place = self.resolve_in_memory(call_id, address, conversation, question)
        if place is not None:
            return place
        arrived_s = time.time()
        may_repeat = address.trajectory_id is None and (address.retry or address.turn_key)
        repeats, again = await self._retried(address, question, arrived_s) if may_repeat else (None, None)
        if address.trajectory_id is not None:
            place = await self._named(address.trajectory_id, address.named_by or "header", conversation)
        elif again is not None and not self._is_over(trail := await self._trail(again.trajectory_id)):
            extends = again.extends or await self._left_at(again, conversation)
            place = Placement(again.trajectory_id, "retry", extends, pins=trail.pins if trail else ())
        else:
            place = self._continued_in_memory(conversation) or await self._elsewhere(conversation, arrived_s)
        return self._placed_at(place, call_id, address, question, arrived_s, instead_of=repeats)

    def resolve_in_memory(
        self, call_id: str, address: Address, conversation: Conversation, question: Question
    ) -> Placement | None:
        """Return the same as `resolve` if no SQL is needed, as for most calls; otherwise None."""
        if address.trajectory_id is not None:
            place = self._named_in_memory(address.trajectory_id, address.named_by or "header", conversation)
        elif address.retry or address.turn_key:
            return None
        else:
            place = self._continued_in_memory(conversation)
        return place and self._placed_at(place, call_id, address, question, time.time())

    def on_recorded(self, call: Call, question: Question | None) -> None:
        """Note that a call has ended, so that each of its answers may be continued.

        A call without a whole answer frees the completion that it continued, and its client may retry it. `question`:
        what it was placed with; None: another process placed it.
        """
        histories, now_s = call.histories, time.time()
        for at, choice in enumerate(call.choices):
            index = choice.index
            if index == 0 and not call.first_id:
                completion_id, trajectory_id = call.id, call.trajectory_id
            else:
                completion_id, trajectory_id = call.completion_id(choice), call.trajectory_of(choice)
            trail = self._see(trajectory_id, now_s)
            trail.tail = completion_id
            trail.pins = and_then(trail.pins, call.policy, call.policy_version, call.created_at_s)
            if at >= len(histories):
                continue
            # Most answers are a text without tool calls: here is what `keys.hashes` and `marks_of` would return.
            keys, message = histories[at], choice.message
            text = message.get("content") if keys.tool_calls is None and len(message) == 2 else None
            hashes: tuple[bytes, ...]
            answer: AnswerMarks | str
            if type(text) is str and keys.conversation is not None:
                hashes, answer = (keys.conversation,), text[-MOST_CHARACTERS:]
            else:
                hashes, answer = keys.hashes, marks_of(message)
            if hashes:
                name = name_of(call.answer_id or call.upstream_id, index)
                prompt = None if keys.conversation is None else prompt_of(keys.conversation)
                self._heads.keep(
                    OpenCompletion(
                        completion_id, trajectory_id, hashes, name, None, False, False, trail.pins, prompt, answer
                    )
                )
                if self._absent:
                    for history in hashes:
                        self._absent.pop(history, None)
        running = None if question is None else self._running.answered(question, call.id)
        if call.status == "complete":
            return
        if running is not None and call.request_digest is not None:
            self._unanswered.add(call.request_digest, call.id, running)
        if call.extends is not None:
            self._heads.release(call.extends, call.id)

    def on_discarded(self, call_id: str, question: Question, place: Placement) -> None:
        """Forget a call that failed and was not recorded."""
        self._running.answered(question, call_id)
        if place.extends is not None:
            self._heads.release(place.extends, call_id)

    def recovered(self, call: Call) -> None:
        """Add a call of a process that died; SQL may not have it yet."""
        if call.extends is not None and call.status == "complete":
            self._heads.keep_taken(OpenCompletion(call.extends, call.trajectory_id), call.id)
        self.on_recorded(call, None)
        if call.request_digest is None:
            return
        self._unanswered.forget(call.request_digest, call.trajectory_id)
        if call.status != "complete" and call.address.trajectory_id is None:
            missed = Repeatable(call.trajectory_id, call.extends, call.address.turn_key, call.created_at_s)
            self._unanswered.add(call.request_digest, call.id, missed)

    async def trains(self, trajectory_id: str) -> bool:
        """Return whether a trajectory is left to training: its first call decided that, which may be another proxy's.
        False while the database cannot tell."""
        trail = self._see(trajectory_id, time.time())
        if trail.trains is None:
            stated = await self._tables.trains(trajectory_id)
            if stated is None:  # no call of it is recorded yet
                return True
            trail.trains = stated
        return trail.trains

    def ended(self, name: str) -> None:
        """Note that a trajectory is over. `name` is its id, or an id of one of its completions that feedback may
        use."""
        head = self._heads.named(name)
        if trail := self._trails.get(head.trajectory_id if head else name):
            trail.over = True

    # By name.

    async def _named(self, name: str, by: str, conversation: Conversation) -> Placement:
        before: TrajectoryState | None = None
        for _ in range(MOST_HOPS):
            trail = await self._trail(name)
            if trail is None or not self._is_over(trail):
                break
            trail.successor = trail.successor or new_id()
            name, before = trail.successor, trail
        if before is not None and (trail is None or trail.tail is None):
            # Several first calls may be written in any order: the link is set in each case.
            return Placement(name, by, continues=before.tail)
        return Placement(name, by) if trail is None else self._within(name, by, trail, conversation)

    def _named_in_memory(self, name: str, by: str, conversation: Conversation) -> Placement | None:
        trail = self._trails.get(name)
        return None if trail is None or self._is_over(trail) else self._within(name, by, trail, conversation)

    def _within(self, name: str, by: str, trail: TrajectoryState, conversation: Conversation) -> Placement:
        tail = self._heads.named(trail.tail) if trail.tail else None
        extends = tail is not None and bool(conversation.answers) and conversation.answers[0] in tail.histories
        return Placement(name, by, extends=tail.completion_id if tail and extends else None, pins=trail.pins)

    async def _trail(self, trajectory_id: str) -> TrajectoryState | None:
        if known := self._trails.get(trajectory_id):
            return known
        trail = await self._tables.trail(trajectory_id, time.time() - self._idle_s)
        # Another call may have read it meanwhile.
        return None if trail is None else self._trails.setdefault(trajectory_id, trail)

    # By retry.

    async def _retried(
        self, address: Address, question: Question, now_s: float
    ) -> tuple[str | None, Repeatable | None]:
        """Return the one call that this call repeats, with its id if it may still run; (None, None) if there is
        no candidate, or more than one."""
        digest = digest_of(question)
        here = self._running.of(question, address.turn_key, now_s)
        here |= self._unanswered.of(digest, address.turn_key, now_s)
        if not here:
            candidates = await self._tables.unanswered(digest, address.turn_key, now_s - WINDOW_S)
            return None, candidates[0] if len(candidates) == 1 else None
        if len(here) > 1:
            return None, None
        ((call_id, call),) = here.items()
        self._running.answered(question, call_id)
        self._unanswered.answered(digest, call_id)
        return call_id, call

    async def _left_at(self, again: Repeatable, conversation: Conversation) -> str | None:
        """Return the completion that the repeated call continued, looked up by its conversation."""
        place = self._continued_in_memory(conversation) or await self._elsewhere(conversation, 0.0)
        return place.extends if place.trajectory_id == again.trajectory_id else None

    # By conversation.

    def _continued_in_memory(self, conversation: Conversation) -> Placement | None:
        """Return a placement if no SQL is needed, otherwise None."""
        if not conversation.answers:
            return Placement(new_id(), "new")
        return self._continued(conversation, looked_up=False)

    async def _elsewhere(self, conversation: Conversation, arrived_s: float) -> Placement:
        """Place a call whose conversation continues no head that is in memory and free."""
        if self._peers.alone and all(one in self._absent for one in conversation.lookup_keys):
            place = self._continued(conversation, looked_up=True)
        else:
            place = await self._look_up(conversation)
            # If SQL does not answer, the other proxies' writes could not be read either.
            if (
                place is None
                and all(self._heads.alike(one) or one in self._absent for one in conversation.lookup_keys)
                and not self._peers.alone
                and self._branch(conversation) is None
            ):
                await self._peers.written(arrived_s)
                place = await self._look_up(conversation)
        return place or self._branch(conversation) or Placement(new_id(), "new")

    async def _look_up(self, conversation: Conversation) -> Placement | None:
        keys, since_s = conversation.lookup_keys, time.time() - self._idle_s
        heads = await self._tables.heads(conversation.answers, conversation.tool_calls, since_s)
        if heads is None:
            return None
        self._learn(heads)
        if keys and not self._heads.alike(keys[0]):
            # Its last answer was not served in these words.
            prompts = [prompt_of(one) for one in conversation.answers]
            self._learn(await self._tables.heads_of_prompts(prompts, since_s))
        evict_oldest(self._absent, self._most_cached)
        # Few-shot prompts contain answers that this proxy never gave. Without this, each call would look them up again.
        self._absent |= {history: None for history in keys if not self._heads.alike(history)}
        return self._continued(conversation, looked_up=True)

    def _learn(self, heads: Iterable[OpenCompletion]) -> None:
        now_s = time.time()
        for head in heads:
            # The state of a trajectory that goes on elsewhere is read where it is needed.
            if self._heads.learn(head) and (head.free or head.over):
                trail = TrajectoryState(head.completion_id, now_s, over=head.over, pins=head.pins)
                self._trails.setdefault(head.trajectory_id, trail)

    def _continued(self, conversation: Conversation, *, looked_up: bool) -> Placement | None:
        """Return the oldest free head with the longest known history, or the head whose answer was rewritten where that
        one's prompt is longer. Return None if there is none, or if SQL must be asked first (unless `looked_up`): it may
        know a longer one, or another one that the rewritten answer may be."""
        if (calls := conversation.tool_calls) is not None:
            if self._heads.alike(calls):
                return self._free(calls, "tool_calls")
            if calls not in self._absent:
                return None
        for place, history in enumerate(conversation.answers):
            if self._heads.alike(history):
                return self._free(history, "content")
            if history not in self._absent:
                return None
            if heads := self._heads.of_prompt(prompt_of(history), MOST_ALIKE):
                if not looked_up:
                    return None
                if going := [head for head in heads if not self._is_over(self._trails.get(head.trajectory_id))]:
                    many = len(heads) == MOST_ALIKE or len(going) > MOST_COMPARED
                    head = _repeated(going[:MOST_COMPARED], echo_since(conversation.messages, place), only_by_id=many)
                    # A shorter prefix would be that of another attempt whose answer was the same up to there.
                    return None if head is None else self._rewritten(head)
        return None

    def _free(self, history: bytes, by: str) -> Placement | None:
        """Return the oldest free head with this history, or None if there is none."""
        while head := self._heads.free(history):
            if not self._is_over(self._trails.get(head.trajectory_id)):
                return Placement(head.trajectory_id, by, extends=head.completion_id, pins=head.pins)
            self._heads.set_aside(head)
        return None

    def _rewritten(self, head: OpenCompletion) -> Placement:
        if head.free:
            return Placement(head.trajectory_id, "rewritten", extends=head.completion_id, pins=head.pins)
        return Placement(new_id(), "fork", continues=head.completion_id, pins=head.pins)

    def _branch(self, conversation: Conversation) -> Placement | None:
        """Return a new trajectory for a call that continues a head which is not free."""
        for history in conversation.lookup_keys:
            if head := self._heads.alike(history):
                by = "after" if self._is_over(self._trails.get(head.trajectory_id)) else "fork"
                return Placement(new_id(), by, continues=head.completion_id, pins=head.pins)
        return None

    # State in memory.

    def _is_over(self, trail: TrajectoryState | None) -> bool:
        return trail is not None and (trail.over or time.time() - trail.seen_s > self._idle_s)

    def _placed_at(
        self,
        place: Placement,
        call_id: str,
        address: Address,
        question: Question,
        now_s: float,
        instead_of: str | None = None,
    ) -> Placement:
        """Note a call's placement; `instead_of`: the call that it repeats."""
        if place.extends is not None:
            self._heads.take(place.extends, call_id, instead_of)
        if address.trajectory_id is None:
            repeatable = Repeatable(place.trajectory_id, place.extends, address.turn_key, now_s)
            self._running.add(question, call_id, repeatable)
        trail = self._see(place.trajectory_id, now_s)
        if not address.trains:
            trail.trains = False
        elif place.by in _BEGINNINGS:
            trail.trains = True
        self.placed[place.by] += 1
        return place

    def _see(self, trajectory_id: str, now_s: float) -> TrajectoryState:
        trails = self._trails
        trail = trails.pop(trajectory_id, None) or TrajectoryState()
        trail.seen_s = now_s
        trails[trajectory_id] = trail
        if len(trails) > self._most_cached:
            evict_oldest(trails, self._most_cached)
        return trail


def _repeated(heads: Sequence[OpenCompletion], echo: Echo, *, only_by_id: bool) -> OpenCompletion | None:
    """Return the head whose answer the echo repeats, by the best evidence that there is; None if none or several fit.
    Of several in one trajectory (a call that broke off, and its retry) the latest is meant."""
    ids = [head.completion_id for head in heads]
    best, matches = Evidence.ID if only_by_id else Evidence.PART, dict[str, OpenCompletion]()
    for head in heads:
        # The choices of a call share its answer's id.
        shared = any(one.startswith(f"{head.completion_id}.") for one in ids)
        level = evidence(head.answer, None if shared else head.completion_id, echo)
        if level > best:
            best, matches = level, {}
        if level == best:
            before = matches.get(head.trajectory_id, head)
            matches[head.trajectory_id] = max(before, head, key=lambda one: one.completion_id)
    return matches.popitem()[1] if len(matches) == 1 else None
