"""Measure each judge against references: rewards from another source.

Judgements are grouped by policy, judge and rubric: another rubric is another question. Of a group that was judged again
with other attempts, only the last judgements count.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from judge.audit import agreement
from judge.audit.store import Day, Reference, StoredJudgement
from judge.ruler.aggregate import verdict
from whetstone.domain.stats import Interval

FEWEST = 20
"""Pairs, attempts or points; with fewer, no number is reported."""
TRUSTED = 0.7
"""A judge is trusted if it orders at least this share of pairs as the reference does."""
Key = tuple[str, str, str]
"""Policy, judge, rubric."""


@dataclass(frozen=True, slots=True)
class ScoreAgreement:
    """How scores and references agree."""

    taus: tuple[float, ...]
    """Kendall's τ_b of each group that has one."""
    pairs: agreement.Pairs

    @property
    def tau(self) -> Interval | None:
        """The mean over the groups."""
        return agreement.mean_interval(self.taus)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of one judge, with one rubric, for one policy."""

    policy: str
    judge: str
    rubric: str
    judged: int
    """Groups that it judged."""
    groups: int
    """How many of these have two attempts with a reference; only those are compared."""
    points: tuple[tuple[float, float], ...]
    """For each such attempt: reference and score."""
    whole: ScoreAgreement
    parts: Mapping[str, ScoreAgreement]
    threshold: float | None
    auc: float | None
    """Over all attempts; those with a reference of at least `threshold` are good."""
    position: Interval | None
    """How much higher an attempt scores when it is shown last."""
    placed: tuple[tuple[float, float], ...]
    """The data behind `position`: `agreement.placed`."""
    noise: float | None
    """How much its judgements of the same attempts differ, as a standard deviation."""
    again: agreement.Pairs
    """Pairs that two of its judgements order."""
    spread: float | None
    """Population standard deviation of a group's scores, averaged over groups."""
    calls: int
    """Calls of the judge for the policy, for all rubrics; the same holds for `refused`."""
    refused: int
    tokens_per_group: float | None
    """Over groups that needed a call; None where none did."""
    usd_per_group: float | None
    """Over the same groups; None where the price of a call is unknown."""

    @property
    def good(self) -> int:
        """Number of attempts with a reference of at least `threshold`."""
        return sum(self.threshold is not None and reference >= self.threshold for reference, _ in self.points)


def calibrations(
    judgement: Iterable[StoredJudgement],
    references: Mapping[str, Reference],
    days: Sequence[Day],
    threshold: float | None = None,
) -> list[Calibration]:
    """Return one for each policy, judge and rubric.

    `threshold`: least reference of a good attempt; None: about half are good.
    """
    by_key: dict[Key, dict[str, list[StoredJudgement]]] = {}
    for one in sorted(judgement, key=lambda one: one.at):
        groups = by_key.setdefault((one.policy, one.judge, one.rubric), {})
        groups.setdefault(one.group_id, []).append(one)
    return [
        _calibration(key, groups, references, [one for one in days if (one.policy, one.judge) == key[:2]], threshold)
        for key, groups in sorted(by_key.items())
    ]


def _calibration(
    key: Key,
    groups: Mapping[str, Sequence[StoredJudgement]],
    references: Mapping[str, Reference],
    days: Sequence[Day],
    threshold: float | None,
) -> Calibration:
    # The judgements of the attempts that were judged last.
    last = [[one for one in several if one.attempts_hash == several[-1].attempts_hash] for several in groups.values()]
    scores = [_scores(several) for several in last]
    compared = [points for points in (_points(one, references) for one in scores) if len(points) > 1]
    flat = [point for points in compared for point in points]
    if threshold is None and flat:
        threshold = agreement.threshold_of([reference for _, reference in flat])
    sections = [_sections(several) for several in last]
    noise, again = agreement.repeatability(section for several in sections for section in several)
    tokens, usd = _costs(groups.values())
    names = sorted(
        {name for several in last for one in several for judgement in one.scores.values() for name in judgement.parts}
    )
    return Calibration(
        *key,
        judged=len(last),
        groups=len(compared),
        points=tuple((reference, score) for score, reference in flat),
        whole=_compared(compared),
        parts={name: _of_part(name, last, references) for name in names},
        threshold=threshold,
        auc=agreement.auc(
            [score for score, _ in flat], [threshold is not None and reference >= threshold for _, reference in flat]
        ),
        position=agreement.position_bias(sections),
        placed=tuple(point for several in sections for one in several for point in agreement.placed(one)),
        noise=noise,
        again=again,
        spread=statistics.fmean(statistics.pstdev(one.values()) for one in scores) if scores else None,
        calls=sum(day.calls for day in days),
        refused=sum(day.refused for day in days),
        tokens_per_group=tokens,
        usd_per_group=usd,
    )


def _scores(several: Sequence[StoredJudgement], part: str | None = None) -> dict[str, float]:
    """Return the judge's score for each trajectory of a group, over all its judgements; or the score of `part`."""
    several = _connected(several)
    attempts = sorted({scored.attempt for one in several for scored in one.scores.values()})
    number = {attempt: place for place, attempt in enumerate(attempts)}
    judged = {
        (one.section, place): {
            number[scored.attempt]: scored.score if part is None else scored.parts[part]
            for scored in one.scores.values()
        }
        for place, one in enumerate(several)
    }
    scores_G = verdict(len(attempts), judged).scores_G
    return {name: scores_G[number[scored.attempt]] for one in several for name, scored in one.scores.items()}


def _connected(several: Sequence[StoredJudgement]) -> list[StoredJudgement]:
    """Return the largest set of judgements whose attempts are linked, directly or through other attempts.

    Where other judges replaced this one, sections that link its own sections may be theirs.
    """
    parts: list[tuple[set[str], list[StoredJudgement]]] = []
    for one in several:
        attempts, linked = {scored.attempt for scored in one.scores.values()}, [one]
        for part in [part for part in parts if part[0] & attempts]:
            parts.remove(part)
            attempts, linked = attempts | part[0], part[1] + linked
        parts.append((attempts, linked))
    return max(parts, key=lambda part: len(part[0]))[1]


def _points(scores: Mapping[str, float], references: Mapping[str, Reference]) -> list[tuple[float, float]]:
    return [(score, references[name].reward) for name, score in sorted(scores.items()) if name in references]


def _of_part(
    name: str, groups: Sequence[Sequence[StoredJudgement]], references: Mapping[str, Reference]
) -> ScoreAgreement:
    """Compare a part with the reference's part of that name or, where no reference has it, with the reward."""
    own = {
        one: Reference(judgement.parts[name], {}) for one, judgement in references.items() if name in judgement.parts
    }
    with_it = [
        several
        for several in groups
        if all(name in one.parts for judgement in several for one in judgement.scores.values())
    ]
    points = [_points(_scores(several, name), own or references) for several in with_it]
    return _compared([one for one in points if len(one) > 1])


def _compared(groups: Sequence[Sequence[tuple[float, float]]]) -> ScoreAgreement:
    taus = (agreement.kendall_tau_b(*zip(*points, strict=True)) for points in groups)
    return ScoreAgreement(tuple(tau for tau in taus if tau is not None), agreement.pair_agreement(groups))


def _sections(several: Sequence[StoredJudgement]) -> list[agreement.Section]:
    """Return, by section, the judgements that were calls: a reused answer is no second opinion."""
    by_section: dict[int, list[agreement.Shown]] = {}
    for one in several:
        if one.was_called:
            by_section.setdefault(one.section, []).append(_shown(one))
    return list(by_section.values())


def _shown(one: StoredJudgement) -> agreement.Shown:
    attempts = {scored.attempt: scored for scored in one.scores.values()}
    last = max(len(attempts) - 1, 1)
    return {attempt: (scored.score, scored.position / last) for attempt, scored in sorted(attempts.items())}


def _costs(groups: Collection[Sequence[StoredJudgement]]) -> tuple[float | None, float | None]:
    """Return tokens and US dollars per group, over groups that needed a call; None: none did, or a price is unknown."""
    calls = [one for several in groups for one in several if one.was_called]
    if not calls:
        return None, None
    needed = sum(any(one.was_called for one in several) for several in groups)
    known = [one.cost_usd for one in calls if one.cost_usd is not None]
    usd = math.fsum(known) / needed if len(known) == len(calls) else None
    return sum(one.tokens for one in calls) / needed, usd
