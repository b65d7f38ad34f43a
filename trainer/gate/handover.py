"""Change the share of the requests that a policy answers in its teacher's place, as the rewards of both allow.

Any process that sweeps looks, and each decision is one transaction. The rule is in `trainer.domain.gate.handover`; the
proxy reads the share with the policies.
"""

import logging
import time
from datetime import datetime

from trainer.domain.gate.handover import handed_over
from trainer.gate.controller import REST, REST_S
from trainer.store.handover import HandoverTables
from whetstone.config.settings import Settings

log = logging.getLogger(__name__)


class HandoverController:
    """Looks at the rewards of policies that take over, policy by policy."""

    def __init__(self, tables: HandoverTables, settings: Settings, rest_s: float = REST_S) -> None:
        self._tables = tables
        self._settings = settings
        self._rest_s = rest_s
        self._rests_until_s: dict[str, float] = {}

    def go_on(self, policy: str, now: datetime) -> None:
        """Take the policy's next look, if it has a teacher and a look is due."""
        settings = self._settings.learning_of(policy).handover
        began = time.monotonic()
        if settings is None or began < self._rests_until_s.get(policy, began):
            return
        state = self._tables.state(policy)
        if state is not None and state.teacher == settings.teacher:
            looked = self._tables.looked(policy, state)
            own, teacher = self._tables.moments(policy, state), self._tables.moments(state.teacher, state)
            verdict = handed_over(own, teacher, state.share, looked, settings)
            if verdict is not None and self._tables.decided(policy, state, verdict, now):
                log.info("%s: handover, %s: %s", policy, verdict.decision, verdict.reason)
        took_s = time.monotonic() - began
        self._rests_until_s[policy] = began + took_s + max(self._rest_s, REST * took_s)
