"""Whose call is this, where the call does not say: which trajectory a request goes on with. In memory first, then SQL.

A completion that may be gone on from is a head, found by the hash of its conversation and answer. The call that
extends a head takes it; of heads with the same history the oldest one that is free is taken. Where none is free
another call went on from it before: that is a fork, and a fork is a trajectory of its own, linked to where it left.
So is what goes on after a trajectory has ended. Knows hashes and ids; no message. Used from one event loop.

With the place it tells which versions spoke there, so that the call may stay on one: up to the completion that it
goes on from where its conversation says so, a fork's and what comes after the end too; else all that spoke in the
trajectory. A trajectory that takes up an ended one's name alone is a new attempt, of which nothing spoke.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from proxy.address import Address
from proxy.call import Call
from proxy.forgetting import oldest
from proxy.heads import Head, Heads, name_of
from proxy.history import Conversation
from proxy.pins import Pins, and_then
from proxy.repeats import WINDOW_S, Question, Repeatable, Repeats, digest_of
from whetstone.ids import new_id

MOST_HOPS = 1000
"""Trajectories that may follow on one another under one name."""


class Trail(msgspec.Struct, gc=False):
    """Where a trajectory stands."""

    tail: str | None = None
    """Its last completion, as far as known."""
    seen_s: float = 0.0
    over: bool = False
    """Feedback or the app has ended it."""
    successor: str | None = None
    """The trajectory that goes on under its name."""
    pins: Pins = ()
    """What spoke in it, as far as known."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a call belongs."""

    trajectory_id: str
    by: str
    """The rule that found it, one of docs/whose_call.md."""
    extends: str | None = None
    """The completion of this trajectory that it goes on from, where the conversation says so."""
    continues: str | None = None
    """The completion that a new trajectory goes on from."""
    pins: Pins = ()
    """What spoke up to there."""


class Tables(Protocol):
    """What SQL knows."""

    async def heads(self, histories: Sequence[bytes], tool_calls: bytes | None, since_s: float) -> list[Head] | None:
        """Completions with one of these histories, the oldest first: those that are free and whose trajectory is open
        and was seen since then, and of all others the last one for each history. None: the database is away."""
        ...

    async def trail(self, trajectory_id: str, since_s: float) -> Trail | None:
        """Where a trajectory stands; it is over too if it was not seen since then. None: there is none."""
        ...

    async def unanswered(self, digest: str, turn_key: str | None, since_s: float) -> list[Repeatable]:
        """Calls with this body, and this turn key if one is given, that were not answered whole since then."""
        ...


class Peers(Protocol):
    """The other proxies on the same tables."""

    @property
    def alone(self) -> bool:
        """There are none."""
        ...

    async def written(self, until_s: float) -> None:
        """Return when the tables have what the others finished before `until_s`, or when that takes too long."""
        ...


class Threads:
    """Finds trajectories. A call is placed when it comes and told of when it is over, whatever came of it."""

    def __init__(self, tables: Tables, peers: Peers, idle_s: float, most_kept: int = 16_000) -> None:
        """`idle_s`: a trajectory is over so many seconds after its last completion. `most_kept`: completions, and
        trajectories, that stay in memory; what is older is found in SQL."""
        self._tables = tables
        self._peers = peers
        self._idle_s = idle_s
        self._placed: dict[str, int] = {}
        self._most_kept = most_kept
        self._heads = Heads(most_kept)
        self._trails: dict[str, Trail] = {}
        """What was seen last stands last."""
        self._running: Repeats[Question] = Repeats(most_kept)
        self._unanswered: Repeats[str] = Repeats(most_kept)
        self._absent: dict[bytes, None] = {}

    @property
    def placed(self) -> Counter[str]:
        """Calls by the rule that found their trajectory."""
        return Counter(self._placed)

    async def place(self, call_id: str, address: Address, asked: Conversation, question: Question) -> Place:
        """Find the trajectory of a call that has just come."""
        place = self.place_at_once(call_id, address, asked, question)
        if place is not None:
            return place
        arrived_s = time.time()
        repeats, again = None, None
        if address.trajectory_id is None and (address.retry or address.turn_key):
            repeats, again = await self._asked_again(address, question, arrived_s)
        if address.trajectory_id is not None:
            place = await self._named(address.trajectory_id, address.named_by or "header", asked)
        elif again is not None and not self._is_over(trail := await self._trail(again.trajectory_id)):
            left_at = again.extends or await self._left_at(again, asked)
            place = Place(again.trajectory_id, "retry", extends=left_at, pins=trail.pins if trail else ())
        else:
            place = self._at_once(asked) or await self._elsewhere(asked, arrived_s)
        return self._placed_at(place, call_id, address, question, arrived_s, instead_of=repeats)

    def place_at_once(self, call_id: str, address: Address, asked: Conversation, question: Question) -> Place | None:
        """The same where it is clear without SQL, as of most calls it is; None where it is not."""
        if address.trajectory_id is not None:
            place = self._named_at_once(address.trajectory_id, address.named_by or "header", asked)
        elif address.retry or address.turn_key:
            return None
        else:
            place = self._at_once(asked)
        return place and self._placed_at(place, call_id, address, question, time.time())

    def over(self, call: Call, question: Question | None) -> None:
        """A call is over: each of its answers may be gone on from. One not answered whole frees what it went on from,
        and its client may ask again. `question`: what it was placed with; None: another process placed it."""
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
            if at < len(histories) and (found_by := histories[at].found_by):
                name = name_of(call.answer_id or call.upstream_id, index)
                self._heads.keep(Head(completion_id, trajectory_id, found_by, name, None, False, False, trail.pins))
                if self._absent:
                    for history in found_by:
                        self._absent.pop(history, None)
        running = None if question is None else self._running.answered(question, call.id)
        if call.status == "complete":
            return
        if running is not None and call.request_digest is not None:
            self._unanswered.add(call.request_digest, call.id, running)
        if call.extends is not None:
            self._heads.release(call.extends, call.id)

    def unrecorded(self, call_id: str, question: Question, place: Place) -> None:
        """A call came to nothing and was not recorded: it was never there."""
        self._running.answered(question, call_id)
        if place.extends is not None:
            self._heads.release(place.extends, call_id)

    def recovered(self, call: Call) -> None:
        """Take up a call of a process that died, which SQL may not have yet."""
        if call.extends is not None and call.status == "complete":
            self._heads.keep_taken(Head(call.extends, call.trajectory_id), call.id)
        self.over(call, None)
        if call.request_digest is None:
            return
        self._unanswered.forget(call.request_digest, call.trajectory_id)
        if call.status != "complete" and call.address.trajectory_id is None:
            missed = Repeatable(call.trajectory_id, call.extends, call.address.turn_key, call.created_at_s)
            self._unanswered.add(call.request_digest, call.id, missed)

    def ended(self, name: str) -> None:
        """A trajectory is over; `name` is its id, or that of one of its completions, as feedback calls it."""
        head = self._heads.named(name)
        if trail := self._trails.get(head.trajectory_id if head else name):
            trail.over = True

    # By name.

    async def _named(self, name: str, by: str, asked: Conversation) -> Place:
        before: Trail | None = None
        for _ in range(MOST_HOPS):
            trail = await self._trail(name)
            if trail is None or not self._is_over(trail):
                break
            trail.successor = trail.successor or new_id()
            name, before = trail.successor, trail
        if before is not None and (trail is None or trail.tail is None):
            # Whichever of several first calls is written first, the link is there.
            return Place(name, by, continues=before.tail)
        return Place(name, by) if trail is None else self._within(name, by, trail, asked)

    def _named_at_once(self, name: str, by: str, asked: Conversation) -> Place | None:
        trail = self._trails.get(name)
        return None if trail is None or self._is_over(trail) else self._within(name, by, trail, asked)

    def _within(self, name: str, by: str, trail: Trail, asked: Conversation) -> Place:
        tail = self._heads.named(trail.tail) if trail.tail else None
        extends = tail is not None and bool(asked.answers) and asked.answers[0] in tail.histories
        return Place(name, by, extends=tail.completion_id if tail and extends else None, pins=trail.pins)

    async def _trail(self, trajectory_id: str) -> Trail | None:
        if known := self._trails.get(trajectory_id):
            return known
        trail = await self._tables.trail(trajectory_id, time.time() - self._idle_s)
        # Another call may have read it meanwhile.
        return None if trail is None else self._trails.setdefault(trajectory_id, trail)

    # By what was asked before.

    async def _asked_again(
        self, address: Address, question: Question, now_s: float
    ) -> tuple[str | None, Repeatable | None]:
        """The one call that this one repeats, with its id where it may still run; nothing where several could be
        meant."""
        digest = digest_of(question)
        here = self._running.of(question, address.turn_key, now_s)
        here |= self._unanswered.of(digest, address.turn_key, now_s)
        if not here:
            found = await self._tables.unanswered(digest, address.turn_key, now_s - WINDOW_S)
            return None, found[0] if len(found) == 1 else None
        if len(here) > 1:
            return None, None
        ((call_id, call),) = here.items()
        self._running.answered(question, call_id)
        self._unanswered.answered(digest, call_id)
        return call_id, call

    async def _left_at(self, again: Repeatable, asked: Conversation) -> str | None:
        """What the repeated call went on from, where only the conversation tells."""
        place = self._at_once(asked) or await self._elsewhere(asked, 0.0)
        return place.extends if place.trajectory_id == again.trajectory_id else None

    # By conversation.

    def _at_once(self, asked: Conversation) -> Place | None:
        """Where it is clear without SQL; None where it is not."""
        return self._free(asked) if asked.answers else Place(new_id(), "new")

    async def _elsewhere(self, asked: Conversation, arrived_s: float) -> Place:
        """Of one that goes on from no head which is known here and free."""
        place = None
        if not (self._peers.alone and all(one in self._absent for one in asked.found_by)):
            place = await self._look_up(asked)
            # Where SQL does not answer, what others write there could not be read either.
            if place is None and self._looked_for(asked) and not self._peers.alone and self._branch(asked) is None:
                await self._peers.written(arrived_s)
                place = await self._look_up(asked)
        return place or self._branch(asked) or Place(new_id(), "new")

    def _looked_for(self, asked: Conversation) -> bool:
        return all(self._heads.alike(history) or history in self._absent for history in asked.found_by)

    async def _look_up(self, asked: Conversation) -> Place | None:
        now_s = time.time()
        found = await self._tables.heads(asked.answers, asked.tool_calls, now_s - self._idle_s)
        if found is None:
            return None
        for head in found:
            if self._heads.learn(head):
                trail = Trail(head.completion_id, now_s, over=head.over, pins=head.pins)
                self._trails.setdefault(head.trajectory_id, trail)
        for forgotten in oldest(self._absent, self._most_kept):
            del self._absent[forgotten]
        for history in asked.found_by:
            # Few-shot prompts hold answers that nobody here gave: not to be looked for at every call.
            if not self._heads.alike(history):
                self._absent[history] = None
        return self._free(asked)

    def _free(self, asked: Conversation) -> Place | None:
        """The oldest free head with the longest history that is known at all; None too where SQL is to be asked first,
        which may know a longer one."""
        for history in asked.found_by:
            if not self._heads.alike(history):
                if history not in self._absent:
                    return None
                continue
            while head := self._heads.free(history):
                if not self._is_over(self._trails.get(head.trajectory_id)):
                    by = "tool_calls" if history == asked.tool_calls else "content"
                    return Place(head.trajectory_id, by, extends=head.completion_id, pins=head.pins)
                self._heads.set_aside(head)
            return None
        return None

    def _branch(self, asked: Conversation) -> Place | None:
        """A trajectory of its own for what goes on from a head that is not free."""
        for history in asked.found_by:
            if head := self._heads.alike(history):
                by = "after" if self._is_over(self._trails.get(head.trajectory_id)) else "fork"
                return Place(new_id(), by, continues=head.completion_id, pins=head.pins)
        return None

    # What is kept.

    def _is_over(self, trail: Trail | None) -> bool:
        return trail is not None and (trail.over or time.time() - trail.seen_s > self._idle_s)

    def _placed_at(
        self,
        place: Place,
        call_id: str,
        address: Address,
        question: Question,
        now_s: float,
        instead_of: str | None = None,
    ) -> Place:
        """Note that a call is there now; `instead_of`: the one that it repeats."""
        if place.extends is not None:
            self._heads.take(place.extends, call_id, instead_of)
        if address.trajectory_id is None:
            call = Repeatable(place.trajectory_id, place.extends, address.turn_key, now_s)
            self._running.add(question, call_id, call)
        self._see(place.trajectory_id, now_s)
        self._placed[place.by] = self._placed.get(place.by, 0) + 1
        return place

    def _see(self, trajectory_id: str, now_s: float) -> Trail:
        trails = self._trails
        trail = trails.pop(trajectory_id, None)
        if trail is None:
            trail = Trail(None, now_s)
        else:
            trail.seen_s = now_s
        trails[trajectory_id] = trail
        if len(trails) > self._most_kept:
            for forgotten in oldest(trails, self._most_kept):
                del trails[forgotten]
        return trail
