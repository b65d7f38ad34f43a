"""Move candidates through the tests of the gate, and watch live versions.

A candidate that has passed the probe waits here while its step is in the state `waiting_gate`. No worker owns it:
any process that sweeps checks it, and each move is one transaction. Formulas and sample sizes are in
`trainer.domain.gate.verdict`.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from trainer.domain.claims import GateStep
from trainer.domain.gate.verdict import FEWEST, Verdict, compared, paired, watched
from trainer.store.gate_tests import GateTables, WatchedVersion
from trainer.store.heldout import Pair
from whetstone.config.gate import GateSettings
from whetstone.config.settings import Settings

REST_S = 2.0
"""Shortest time between two reads of a policy's rewards."""
REST = 20.0
"""The pause is also at least this many times as long as the read took, so that many rewards do not keep the worker
busy.
"""
MOST_READ = 20_000
"""Most rewards of a parent that are read."""

log = logging.getLogger(__name__)


class GateController:
    """Makes the moves, policy by policy."""

    def __init__(self, tables: GateTables, settings: Settings, rest_s: float = REST_S) -> None:
        self._tables = tables
        self._rest_s = rest_s
        self._gate = settings.gate
        self._keep_served = settings.trainer.keep_served
        self._rests_until_s: dict[str, float] = {}

    def go_on(self, policy: str, now: datetime) -> None:
        """Make the policy's next move, if one is due."""
        began = time.monotonic()
        if began < self._rests_until_s.get(policy, began):
            return
        moved = self._watch(policy, now)
        tested = self._tables.tested(policy)
        if tested is not None:
            moved = self._test(tested, now) or moved
        took_s = time.monotonic() - began
        if not moved:
            self._rests_until_s[policy] = began + took_s + max(self._rest_s, REST * took_s)

    def _test(self, tested: GateStep, now: datetime) -> bool:
        """Continue the tests of a candidate; return whether it moved."""
        by_hand = tested.state != "candidate" or tested.live_version != tested.version_in
        left = [test for test in self._gate.waits_for if test not in tested.passed]
        if by_hand or not left:
            why_not = self._tables.promoted(tested, self._keep_served, now)
            log.info("step %s: %s is %s", tested.id, tested.name_out, f"not live: {why_not}" if why_not else "live")
            return True
        if tested.tested_by is None:
            self._begin(tested, left[0] == "heldout", now)
            return True
        if tested.tested_by not in left:
            self._tables.leave(tested)
            return True
        verdict = self._heldout(tested, now) if tested.tested_by == "heldout" else self._canary(tested, now)
        return self._decided(tested, tested.tested_by, verdict, now)

    def _begin(self, tested: GateStep, heldout: bool, now: datetime) -> None:
        if not heldout:
            share = self._gate.canary_share
            log.info("step %s: %s answers %.0f %% of new trajectories", tested.id, tested.name_out, 100 * share)
            self._tables.begin(tested, "canary", now, canary_share=self._gate.canary_share)
            return
        prompts = self._tables.prompts(tested.policy, self._gate.heldout_prompts)
        if len(prompts) < self._gate.heldout_minimum:
            verdict = Verdict("reject", _too_few_prompts(len(prompts), self._gate), {"prompts": float(len(prompts))})
            self._decided(tested, "heldout", verdict, now)
            return
        log.info("step %s: %s answers %d held-out prompts", tested.id, tested.name_out, len(prompts))
        self._tables.begin(tested, "heldout", now, sources=prompts)

    def _heldout(self, tested: GateStep, now: datetime) -> Verdict:
        verdict = heldout_verdict(self._tables.pairs(tested), self._gate, late=self._late(tested, now))
        if "candidate_mean" in verdict.figures:
            figures = verdict.figures
            self._tables.measured(tested, int(figures["prompts"]), figures["candidate_mean"], figures["parent_mean"])
        return verdict

    def _canary(self, tested: GateStep, now: datetime) -> Verdict:
        since = tested.tested_since
        assert since is not None
        candidate = self._tables.moments(tested.policy, tested.version_out, since)
        parent = self._tables.moments(tested.policy, tested.version_in, since)
        looked = self._tables.looked(tested.policy, tested.version_out, "canary", since)
        verdict = compared(candidate, parent, self._gate, looked)
        if verdict.decision == "testing" and self._late(tested, now):
            return replace(verdict, decision="reject", reason=f"no decision within gate.deadline_s: {verdict.reason}")
        if verdict.decision == "testing" and verdict.looked > looked:
            self._tables.note(tested, "canary", verdict, now)
        return verdict

    def _decided(self, tested: GateStep, test: str, verdict: Verdict, now: datetime) -> bool:
        if verdict.decision == "testing":
            return False
        log.info("step %s: %s, %s: %s", tested.id, tested.name_out, test, verdict.reason)
        if verdict.decision == "reject":
            self._tables.rejected(tested, test, verdict, now)
            return True
        is_last = {*self._gate.waits_for} <= {*tested.passed, test}
        why_not = self._tables.passed(tested, test, verdict, self._keep_served if is_last else None, now)
        if is_last:
            log.info("step %s: %s is %s", tested.id, tested.name_out, f"not live: {why_not}" if why_not else "live")
        return True

    def _late(self, tested: GateStep, now: datetime) -> bool:
        assert tested.tested_since is not None
        return now - tested.tested_since >= timedelta(seconds=self._gate.deadline_s)

    def _watch(self, policy: str, now: datetime) -> bool:
        """Compare the live version with its parent; return whether anything was decided."""
        version = self._tables.watched(policy) if self._gate.rollback else None
        if version is None:
            return False
        live = self._tables.moments(policy, version.version, version.since)
        late = now - version.since >= timedelta(seconds=self._gate.deadline_s)
        if live.count < FEWEST and not late:
            return False
        before = self._tables.rewards(policy, version.parent, version.since, MOST_READ)
        looked = self._tables.looked(policy, version.version, "watch", version.since)
        verdict = watched(live, before, self._gate, looked)
        if late and min(live.count, len(before)) < FEWEST:
            had = f"{live.count} groups with rewards, its parent {len(before)}"
            verdict = Verdict(
                "pass", f"too few rewards in {self._gate.deadline_s:g} s: it has {had}, of {FEWEST} needed"
            )
        return self._watched(policy, version, verdict, looked, now)

    def _watched(self, policy: str, version: WatchedVersion, verdict: Verdict, looked: int, now: datetime) -> bool:
        if verdict.decision == "reject":
            back = self._tables.roll_back(policy, version, verdict, self._keep_served, now)
            outcome = f"version {back} answers again" if isinstance(back, int) else f"it still answers: {back}"
            log.error("%s: version %d is %s; %s", policy, version.version, verdict.reason, outcome)
        elif verdict.decision == "pass" or verdict.looked > looked:
            self._tables.note_watch(policy, version, verdict, now)
        return verdict.decision != "testing"


def heldout_verdict(pairs: Sequence[Pair], gate: GateSettings, *, late: bool) -> Verdict:
    """Return the verdict on the held-out answers, once all have their rewards.

    When it is late, the answers that have rewards decide.
    """
    waiting = sum(pair.waits for pair in pairs)
    if waiting and not late:
        return Verdict("testing", f"{waiting} of {len(pairs)} prompts wait for answers or rewards")
    rewarded = [(one.candidate, one.parent) for one in pairs if one.candidate is not None and one.parent is not None]
    if len(rewarded) < gate.heldout_minimum:
        why = (
            f"{len(rewarded)} of {len(pairs)} held-out prompts have rewards for both versions, gate.heldout_minimum is "
            f"{gate.heldout_minimum}: reward functions or judges give them (docs/rewards_in_code.md, docs/ruler.md)"
        )
        return Verdict("reject", why, {"prompts": float(len(rewarded))})
    verdict = paired([candidate - parent for candidate, parent in rewarded], gate)
    means = [math.fsum(rewards) / len(rewarded) for rewards in zip(*rewarded, strict=True)]
    figures = {**verdict.figures, "candidate_mean": means[0], "parent_mean": means[1]}
    return replace(verdict, figures=figures)


def _too_few_prompts(count: int, gate: GateSettings) -> str:
    return (
        f"{count} prompts of the eval split, gate.heldout_minimum is {gate.heldout_minimum}: send chats with "
        "`X-Split: eval`, which no step trains on, or take `heldout` out of gate.tests"
    )
