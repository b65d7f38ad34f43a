"""How a call ends: its record, what may go on from it, what its key has left, what is said again to who asks again.

Knows who is told, and in which order; no app, no model server.
"""

from collections.abc import Callable, Sequence

from proxy.call import Call
from proxy.recorder import Recorder
from proxy.replays import Replays
from proxy.threads import Threads
from proxy.turn import Ended, Turn
from whetstone.keys import Principal


class Ends:
    """Tells how calls end, each once (`Turn.recorded`)."""

    def __init__(
        self, recorder: Recorder, threads: Threads, answered: Replays, charge: Callable[[Principal, int], None]
    ) -> None:
        self._recorder = recorder
        self._threads = threads
        self._answered = answered
        self._charge = charge

    async def record(self, turn: Turn, ended: Ended) -> Sequence[Call]:
        """Record it, without what is to be redacted; what was recorded, for `over`.

        Raises:
            NotRecorded: the journal takes nothing, and unrecorded answers are not wanted.
        """
        if turn.redactor is None:
            return self.at_once(turn, ended)
        try:
            calls = await turn.redactor.apart(turn.calls(ended))
        except Exception:
            self.nothing(turn)
            raise
        # Not before: an app that hangs up while it is redacted leaves a call to record.
        return self._take(turn, ended, calls)

    def at_once(self, turn: Turn, ended: Ended) -> Sequence[Call]:
        """The same (`record`) where nothing is to be redacted."""
        try:
            calls = turn.calls(ended)
        except Exception:
            self.nothing(turn)
            raise
        return self._take(turn, ended, calls)

    def over(self, turn: Turn, recorded: Sequence[Call]) -> None:
        """Let others go on from what was recorded: at the latest in the turn of the event loop in which an app may have
        heard all of it. Behind the last byte of a whole answer nobody waits for it."""
        for call in recorded:
            self._threads.over(call, turn.question)

    def nothing(self, turn: Turn) -> None:
        """It came to nothing that could be recorded: it was never there."""
        turn.recorded = True
        assert turn.place is not None
        self._threads.unrecorded(turn.id, turn.question, turn.place)

    def _take(self, turn: Turn, ended: Ended, calls: Sequence[Call]) -> Sequence[Call]:
        principal, turn_key = turn.principal, turn.address.turn_key
        turn.recorded, turn.ended = True, ended
        recorded: list[Call] = []
        try:
            for call in calls:
                if self._recorder.take(call):
                    recorded.append(call)
                else:
                    turn.dropped = True
                # Nobody counts what has no limit.
                if principal is not None and principal.tokens_per_min is not None:
                    self._charge(principal, call.tokens)
        except Exception:
            self._in_part(turn, recorded)
            raise
        if turn.dropped:
            self._in_part(turn, recorded)
            return ()
        if ended.reply is not None and turn_key is not None:
            self._answered.keep(turn_key, ended.reply)
        return recorded

    def _in_part(self, turn: Turn, recorded: Sequence[Call]) -> None:
        """Not all of it was recorded: let others go on from what was, and only then let go of the request, by which a
        call that broke off is known when it is asked again."""
        self.over(turn, recorded)
        self.nothing(turn)
