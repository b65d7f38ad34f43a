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
        resolver: TrajectoryResolver,
        replays: Replays,
        charge: Callable[[Principal, int], None],
    ) -> None:
        self._recorder = recorder
        self._resolver = resolver
        self._replays = replays
        self._charge = charge

    async def record(self, context: CallContext, result: CallResult) -> Sequence[Call]:
        """Redact and record a call; return what was recorded, for `on_recorded`.

        Raises:
            NotRecorded: the journal accepts nothing, and unrecorded answers are not wanted.
        """
        if context.redactor is None:
            return self.record_now(context, result)
        try:
            calls = await context.redactor.calls_off_loop(context.calls(result))
        except Exception:
            self.on_discarded(context)
            raise
        # Mark the call only now: if an app disconnects during redaction, the call is still to be recorded.
        return self._hand_over(context, result, calls)

    def record_now(self, context: CallContext, result: CallResult) -> Sequence[Call]:
        """Do the same as `record`, without redaction."""
        try:
            calls = context.calls(result)
        except Exception:
            self.on_discarded(context)
            raise
        return self._hand_over(context, result, calls)

    def on_recorded(self, context: CallContext, recorded: Sequence[Call]) -> None:
        """Let other calls continue what was recorded. Call this at the latest in the event loop turn in which an app
        may have received the whole answer. Called after the last byte of a whole answer, it delays no request."""
        for call in recorded:
            self._resolver.on_recorded(call, context.question)

    def on_discarded(self, context: CallContext) -> None:
        """Forget a call that failed and could not be recorded."""
        context.recorded = True
        assert context.place is not None
        self._resolver.on_discarded(context.id, context.question, context.place)

    def _hand_over(self, context: CallContext, result: CallResult, calls: Sequence[Call]) -> Sequence[Call]:
        principal, turn_key = context.principal, context.address.turn_key
        context.recorded, context.result = True, result
        recorded: list[Call] = []
        try:
            for call in calls:
                if self._recorder.record_or_drop(call):
                    recorded.append(call)
                else:
                    context.dropped = True
                # Only limited keys are charged.
                if principal is not None and principal.tokens_per_min is not None:
                    self._charge(principal, call.tokens)
        except Exception:
            self._in_part(context, recorded)
            raise
        if context.dropped:
            self._in_part(context, recorded)
            return ()
        if result.reply is not None and turn_key is not None:
            self._replays.keep(turn_key, result.reply)
        return recorded

    def _in_part(self, context: CallContext, recorded: Sequence[Call]) -> None:
        """Finish a call that was recorded in part: let other calls continue that part, and only then release the
        request, because a retry of an aborted call is recognised by it."""
        self.on_recorded(context, recorded)
        self.on_discarded(context)
