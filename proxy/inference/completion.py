"""Finish a call: record it, let other calls continue it, charge its key, and store the answer for retries."""

from collections.abc import Callable, Sequence

from proxy.domain.call import Call
from proxy.inference.context import CallContext, CallResult
from proxy.inference.idempotency import Replays
from proxy.recording.recorder import Recorder
from proxy.trajectories.resolver import TrajectoryResolver
from whetstone.domain.api_keys import Principal


class CallFinisher:
    """Finishes calls, each once (`CallContext.recorded`)."""

    def __init__(
        self,
        recorder: Recorder,
        threads: TrajectoryResolver,
        answered: Replays,
        charge: Callable[[Principal, int], None],
    ) -> None:
        self._recorder = recorder
        self._threads = threads
        self._answered = answered
        self._charge = charge

    async def record(self, turn: CallContext, ended: CallResult) -> Sequence[Call]:
        """Redact and record a call; return what was recorded, for `over`.

        Raises:
            NotRecorded: the journal accepts nothing, and unrecorded answers are not wanted.
        """
        if turn.redactor is None:
            return self.at_once(turn, ended)
        try:
            calls = await turn.redactor.apart(turn.calls(ended))
        except Exception:
            self.nothing(turn)
            raise
        # Mark the call only now: if an app disconnects during redaction, the call is still to be recorded.
        return self._take(turn, ended, calls)

    def at_once(self, turn: CallContext, ended: CallResult) -> Sequence[Call]:
        """Do the same as `record`, without redaction."""
        try:
            calls = turn.calls(ended)
        except Exception:
            self.nothing(turn)
            raise
        return self._take(turn, ended, calls)

    def over(self, turn: CallContext, recorded: Sequence[Call]) -> None:
        """Let other calls continue what was recorded. Call this at the latest in the event loop turn in which an app
        may have received all of it. Called after the last byte of a whole answer, it delays no request."""
        for call in recorded:
            self._threads.over(call, turn.question)

    def nothing(self, turn: CallContext) -> None:
        """Forget a call that failed and could not be recorded."""
        turn.recorded = True
        assert turn.place is not None
        self._threads.unrecorded(turn.id, turn.question, turn.place)

    def _take(self, turn: CallContext, ended: CallResult, calls: Sequence[Call]) -> Sequence[Call]:
        principal, turn_key = turn.principal, turn.address.turn_key
        turn.recorded, turn.ended = True, ended
        recorded: list[Call] = []
        try:
            for call in calls:
                if self._recorder.take(call):
                    recorded.append(call)
                else:
                    turn.dropped = True
                # Only limited keys are charged.
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

    def _in_part(self, turn: CallContext, recorded: Sequence[Call]) -> None:
        """Finish a call that was recorded in part: let other calls continue that part, and only then release the
        request, because a retry of an aborted call is recognised by it."""
        self.over(turn, recorded)
        self.nothing(turn)
