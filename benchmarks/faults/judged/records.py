"""Compare SQL's records of the groups of `judged` with the judge's calls and the worth of each attempt. Reads only."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

from benchmarks.fakes.judge import worth
from benchmarks.kit.harness import present

SIZE = 8
"""Attempts in each group: choices of one call."""
SAME_USD = 1e-9
"""Allowed difference of sums of dollars that were added in another order."""

_STATES = "SELECT state, count(*) FROM admin_groups WHERE project = :project GROUP BY state"
_GROUPS = "SELECT group_id, formed_by, state, reason, size FROM admin_groups WHERE project = :project"
_ATTEMPTS = """
    SELECT t.group_id, c.response_text, t.reward, t.reward_source
    FROM admin_trajectories AS t
    JOIN admin_completions AS c ON c.project = t.project AND c.trajectory_id = t.trajectory_id
    WHERE t.project = :project
"""
_JUDGEMENTS = """
    SELECT id, group_id, place, purpose, state, calls, prompt_tokens + completion_tokens AS tokens, cost_usd
    FROM judgements WHERE project = :project
"""
_DAYS = """
    SELECT coalesce(sum(calls), 0), coalesce(sum(refused), 0), coalesce(sum(failed), 0), coalesce(sum(tokens), 0),
           coalesce(sum(cost_usd), 0)
    FROM admin_judge_days WHERE project = :project
"""
_RANKING_FEEDBACK = """
    SELECT feedback_id, state FROM admin_feedback WHERE project = :project AND source = 'judge'
"""


@dataclass(frozen=True)
class Group:
    """A group in SQL."""

    group_id: str
    formed_by: str
    state: str
    reason: str | None
    size: int


@dataclass(frozen=True)
class Attempt:
    """A completion, and the reward of its trajectory; None: no reward."""

    group_id: str | None
    answer: str | None
    reward: float | None
    source: str | None


@dataclass(frozen=True)
class Judgement:
    """A row of table `judgements`."""

    judgement_id: str
    group_id: str
    place: int
    purpose: str
    state: str
    calls: int
    tokens: int
    cost_usd: float | None


@dataclass(frozen=True)
class Days:
    """`admin_judge_days` over all days and judges."""

    calls: int
    refused: int
    failed: int
    tokens: int
    cost_usd: float


@dataclass(frozen=True)
class Ledger:
    """All that SQL has."""

    groups: Sequence[Group]
    attempts: Sequence[Attempt]
    judgements: Sequence[Judgement]
    days: Days


class Records:
    """Reads a project's tables."""

    def __init__(self, engine: Engine, project: str) -> None:
        self._reader = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._project = {"project": project}

    def _rows(self, query: str) -> Sequence[Any]:
        with self._reader.connect() as connection:
            return connection.execute(text(query), self._project).all()

    def states(self) -> Counter[str]:
        """Return the number of groups in each state."""
        return Counter(dict(self._rows(_STATES)))

    def ranking_feedback(self) -> dict[str, str]:
        """Return the state of each feedback that requests or gives a ranking, by id."""
        return dict(self._rows(_RANKING_FEEDBACK))

    def ledger(self) -> Ledger:
        """Read everything, after the last write."""
        (calls, refused, failed, tokens, cost_usd), *_ = self._rows(_DAYS)
        return Ledger(
            groups=[Group(*row) for row in self._rows(_GROUPS)],
            attempts=[Attempt(*row) for row in self._rows(_ATTEMPTS)],
            judgements=[Judgement(*row) for row in self._rows(_JUDGEMENTS)],
            days=Days(int(calls), int(refused), int(failed), int(tokens), float(cost_usd)),
        )


def wrong_with(
    ledger: Ledger, groups: int, judgements: int, calls: int, may_be_lost: int, min_spread: float
) -> list[str]:
    """Return what does not hold of `groups` groups with `judgements` judgements each.

    `calls`: calls that reached the judge. `may_be_lost`: how many of them may have been lost with a killed worker,
    before it stored their results. `min_spread`: as in the settings.
    """
    return [
        *_wrong_groups(ledger, groups, min_spread),
        *_wrong_rewards(ledger.attempts),
        *_wrong_slots(ledger, judgements),
        *_wrong_calls(ledger, groups * judgements, calls, may_be_lost),
    ]


def wrong_again(
    before: Ledger, after: Ledger, calls: int, group_of: Mapping[str, str], became: Mapping[str, str]
) -> list[str]:
    """Return what does not hold of a second run that ranked every group again, with `calls` more calls to the judge.

    `group_of`: group by feedback; `became`: state by feedback. A discarded group leaves its feedback unused.
    """
    state = {group.group_id: group.state for group in before.groups}
    due = {one: "unused" if state.get(group) == "discarded" else "applied" for one, group in group_of.items()}
    wrong = [f"{became.get(one)}, not {right}" for one, right in due.items() if became.get(one) != right]
    faults = {
        f"the second run cost {calls} calls": calls,
        f"{len(wrong)} feedbacks of the second run came to something else, one is {next(iter(wrong), None)}": wrong,
        **{
            f"the second run changed {what}": Counter(getattr(before, what)) != Counter(getattr(after, what))
            for what in ("groups", "attempts", "judgements")
        },
        "the second run is counted in admin_judge_days": before.days != after.days,
    }
    return present(faults)


def _wrong_groups(ledger: Ledger, groups: int, min_spread: float) -> list[str]:
    faults = present({f"{len(ledger.groups)} groups, not {groups}": len(ledger.groups) != groups})
    answers: dict[str | None, list[str | None]] = defaultdict(list)
    for attempt in ledger.attempts:
        answers[attempt.group_id].append(attempt.answer)
    for group in ledger.groups:
        worths = [_worth(one) for one in answers[group.group_id]]
        if group.formed_by != "choices" or group.size != SIZE or len(worths) != SIZE:
            faults.append(f"group {group.group_id} is {len(worths)} attempts by {group.formed_by}, size {group.size}")
            continue
        too_alike = statistics.pstdev(worths) < min_spread
        due = ("discarded", "judge_noise") if too_alike else ("scored", None)
        if (group.state, group.reason) != due:
            faults.append(f"group {group.group_id} is {group.state} ({group.reason}), not {due[0]} ({due[1]})")
    if len(ledger.attempts) != SIZE * groups:
        faults.append(f"{len(ledger.attempts)} attempts, not {SIZE * groups}")
    return faults


def _wrong_rewards(attempts: Sequence[Attempt]) -> list[str]:
    wrong = [one for one in attempts if one.reward != _worth(one.answer) or one.source != "judge"]
    if not wrong:
        return []
    first = wrong[0]
    example = f"{first.reward} by {first.source}, not {_worth(first.answer)} by judge"
    return [f"{len(wrong)} attempts have another reward than they are worth, one has {example}"]


def _wrong_slots(ledger: Ledger, judgements: int) -> list[str]:
    """Check that each place of each group has one accepted judgement, and that there are no others."""
    rows = Counter((one.group_id, one.place, one.purpose) for one in ledger.judgements)
    slots = {(group.group_id, place, "reward") for group in ledger.groups for place in range(judgements)}
    twice = sum(count > 1 for count in rows.values())
    waiting = sum(one.state != "accepted" for one in ledger.judgements)
    faults = {
        f"{len(slots - rows.keys())} judgements are missing": slots - rows.keys(),
        f"{len(rows.keys() - slots)} judgements of places that were not requested": rows.keys() - slots,
        f"{twice} places have more than one judgement": twice,
        f"{waiting} judgements were not accepted": waiting,
    }
    return present(faults)


def _wrong_calls(ledger: Ledger, slots: int, calls: int, may_be_lost: int) -> list[str]:
    """Check that the calls at the judge, in the judgements and in the days are equal, except for lost calls."""
    days, stored = ledger.days, sum(one.calls for one in ledger.judgements)
    tokens = sum(one.tokens for one in ledger.judgements)
    cost_usd = math.fsum(one.cost_usd or 0.0 for one in ledger.judgements)
    same_usd = abs(days.cost_usd - cost_usd) <= SAME_USD * max(1, slots)
    faults = {
        f"the judge received {calls} calls, {stored} are stored, and {may_be_lost} may be lost": not (
            0 <= calls - stored <= may_be_lost
        ),
        f"{calls} calls for {slots} judgements, of which {may_be_lost} may be lost": calls > slots + may_be_lost,
        f"admin_judge_days tells {days.calls} calls ({days.refused} refused, {days.failed} failed), not {stored}": (
            (days.calls, days.refused, days.failed) != (stored, 0, 0)
        ),
        f"admin_judge_days tells {days.tokens} tokens for ${days.cost_usd}, judgements {tokens} for ${cost_usd}": (
            days.tokens != tokens or not same_usd
        ),
    }
    return present(faults)


def _worth(answer: str | None) -> float:
    return worth({"content": answer or ""})
