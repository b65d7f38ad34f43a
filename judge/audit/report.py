"""Turn measurements of judges into tables, sentences and plots.

matplotlib, which draws the plots, is in the extra `demo` and may not be installed.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from judge.audit.agreement import FEWEST_CLUSTERS, Pairs
from judge.audit.calibrate import FEWEST, TRUSTED, Calibration, ScoreAgreement
from judge.audit.hacking_signs import FEWEST_GROUPS, Alarm, DriftDay, RankedGroup
from judge.audit.store import Day, Waiting
from judge.errors import JudgeError
from whetstone.domain.stats import Interval

NOTHING = "–"
LINE, DOT = "#1f4e79", "#b45309"
BINS = 20


class NoMatplotlib(JudgeError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells, for any output."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return it as Markdown, with the title as a heading."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        cells = (" | ".join(cell.replace("|", r"\|") for cell in line) for line in lines)
        return "\n".join([f"## {self.title}\n", *(f"| {line} |" for line in cells), ""])


def title(of: Calibration) -> str:
    """Return the title: judge, policy and rubric."""
    return f"judge {of.judge}, policy {of.policy}, rubric {of.rubric[:8]}"


def table(of: Calibration) -> Table:
    """Return a table of all measurements. From fewer than 20 pairs or attempts, or 10 groups, no number is shown."""
    pairs, again = of.whole.pairs, of.again
    rows = [
        ("groups compared", str(of.groups), f"of {of.judged} that it judged"),
        ("Kendall's τ", _tau(of.whole), f"mean of {len(of.whole.taus)} groups"),
        ("pairs ordered as the reference does", _share(pairs), f"{pairs.of} pairs"),
        ("AUC", _auc(of), f"{len(of.points)} attempts, {of.good} with at least {_number(of.threshold)}"),
        *(
            row
            for name, part in of.parts.items()
            for row in (
                (f"part {name}: Kendall's τ", _tau(part), f"mean of {len(part.taus)} groups"),
                (f"part {name}: pairs ordered alike", _share(part.pairs), f"{part.pairs.of} pairs"),
            )
        ),
        ("score shown last, less shown first", _position(of), f"{len(of.placed)} scores"),
        ("two judgements of the same differ by", _number(of.noise), f"scores of a group: {_number(of.spread)}"),
        ("pairs that both order alike", _share(again), f"{again.of} pairs"),
        ("refused answers", f"{of.refused / of.calls:.1%}" if of.calls else NOTHING, f"{of.calls} calls"),
        ("tokens a group", f"{of.tokens_per_group:.0f}" if of.tokens_per_group is not None else NOTHING, ""),
        ("US dollars a group", f"{of.usd_per_group:.4f}" if of.usd_per_group is not None else "unknown", ""),
    ]
    return Table(title(of), ("", "", "over"), tuple(rows))


def verdicts(of: Calibration) -> list[str]:
    """Return the conclusions as sentences; the first says whether to trust the judge."""
    return [f"{title(of)}: {_trust(of.whole.pairs)}", *_doubts(of)]


def days_table(days: Sequence[Day]) -> Table:
    """Return a table of what judging cost."""
    return Table(
        title="what judging took (dollars as far as prices are known)",
        columns=("day", "policy", "judge", "calls", "refused", "failed", "tokens", "US dollars"),
        rows=tuple(
            (
                *(one.day, one.policy, one.judge),
                *map(str, (one.calls, one.refused, one.failed, one.tokens)),
                f"{one.cost_usd:.4f}",
            )
            for one in days
        ),
    )


def waiting_table(waiting: Sequence[Waiting]) -> Table:
    """Return a table of groups that judges have not ranked yet."""
    return Table(
        title="groups that wait for judges",
        columns=("policy", "groups", "the oldest since (UTC)", "for"),
        rows=tuple(
            (
                one.policy,
                str(one.groups),
                f"{one.since:%Y-%m-%d %H:%M}" if one.since else NOTHING,
                one.why or "its turn",
            )
            for one in waiting
        ),
    )


def noise_table(ranked: Sequence[RankedGroup]) -> Table:
    """Return a table of how much judges differ from themselves; groups that were discarded for it count too."""
    rows = []
    for policy in sorted({one.policy for one in ranked}):
        its = [one for one in ranked if one.policy == policy]
        noise = [one.noise for one in its if one.noise is not None]
        mean = sum(noise) / len(noise) if noise else None
        rows.append((policy, str(len(its)), _number(mean), str(sum(one.discarded for one in its))))
    return Table(
        title="by how much judges differ from themselves",
        columns=("policy", "groups ranked", "noise, in the mean", "discarded as judge_noise"),
        rows=tuple(rows),
    )


def drift_table(days: Sequence[DriftDay]) -> Table:
    """Return a table of judges compared with their strong judge."""
    return Table(
        title="judges and their strong judge",
        columns=("day", "policy", "pairs", "ordered alike", "judge scores higher by"),
        rows=tuple(
            (one.day, one.policy, str(one.pairs), f"{one.agreement:.0%}", f"{one.difference:+.3f}")
            for one in sorted(days, key=lambda one: one.day)
        ),
    )


def alarmed(alarms: Iterable[Alarm], *, ranked: int) -> list[str]:
    """Return the alarms as sentences; without any, a sentence that there is none."""
    few = f" With fewer than {2 * FEWEST_GROUPS} ranked groups ({ranked}) none could be seen."
    none = "No alarm." + (few if ranked < 2 * FEWEST_GROUPS else "")
    return [f"ALARM {one.name} ({one.policy}): {one.figures}. Look at {one.look_at}." for one in alarms] or [none]


def _trust(pairs: Pairs) -> str:
    agreed = pairs.share
    if agreed is None or pairs.of < FEWEST:
        return f"too few. {pairs.of} pairs of attempts can be compared; {FEWEST} is the least that says anything."
    shown = f"It orders {_percent(agreed)} of {pairs.of} pairs as the reference does"
    if agreed.low <= 0.5 <= agreed.high:
        return f"within noise. {shown}, which may be chance."
    if agreed.high < 0.5:
        return f"do not trust it. {shown}: it prefers what the reference holds for worse."
    if agreed.mean >= TRUSTED:
        return f"trust. {shown}."
    return f"weak. {shown}: better than chance, and below the {TRUSTED:.0%} of a judge to rely on."


def _doubts(of: Calibration) -> Iterator[str]:
    if of.position is not None and len(of.placed) >= FEWEST and not of.position.low <= 0 <= of.position.high:
        where = "last" if of.position.mean > 0 else "first"
        yield (
            f"It favours what it is shown {where}, by {abs(of.position.mean):.2f}. Each judgement draws another "
            "order, so more judgements even it out."
        )
    if of.noise is not None and of.spread is not None and of.noise >= of.spread:
        yield (
            f"Two of its judgements differ by {of.noise:.2f}, no less than the scores of a group ({of.spread:.2f}): "
            "ask for more judgements, or another judge."
        )
    for name, part in of.parts.items():
        agreed = part.pairs.share
        if agreed is not None and part.pairs.of >= FEWEST and agreed.low <= 0.5:
            shown = f"{_percent(agreed)} of {part.pairs.of} pairs"
            yield f"Part {name} does not go with the reference for certain ({shown})."


def _tau(of: ScoreAgreement) -> str:
    tau = of.tau if of.pairs.of >= FEWEST and len(of.taus) >= FEWEST_CLUSTERS else None
    return "too few" if tau is None else f"{tau.mean:.2f} ({max(-1.0, tau.low):.2f} to {min(1.0, tau.high):.2f})"


def _share(pairs: Pairs) -> str:
    agreed = pairs.share
    return _percent(agreed) if agreed is not None and pairs.of >= FEWEST else "too few" if pairs.of else NOTHING


def _auc(of: Calibration) -> str:
    return "too few" if len(of.points) < FEWEST else NOTHING if of.auc is None else f"{of.auc:.2f}"


def _position(of: Calibration) -> str:
    at = of.position if len(of.placed) >= FEWEST else None
    return "too few" if at is None else f"{at.mean:+.3f} ({at.low:+.3f} to {at.high:+.3f})"


def _percent(interval: Interval) -> str:
    return f"{interval.mean:.0%} ({interval.low:.0%} to {interval.high:.0%})"


def _number(number: float | None) -> str:
    return NOTHING if number is None else f"{number:.3g}"


def draw(folder: Path, of: Calibration) -> list[Path]:
    """Write three PNGs and return their paths: scores against references, scores by position, τ of the groups.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(
            "no pictures: matplotlib is not installed (pip install -e '.[demo]' in the repository)"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    prefix = "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in (of.policy, of.judge, of.rubric[:8]))
    written = []
    for name, fill in _PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
        fill(axes, of)
        axes.set_title(title(of), fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        written.append(folder / f"{prefix}-{name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _plot_scores(axes: Any, of: Calibration) -> None:
    axes.scatter(*(zip(*of.points, strict=True) if of.points else ((), ())), color=DOT, s=12, alpha=0.4)
    axes.set(xlabel="reference", ylabel="score of the judge", ylim=(-0.03, 1.03))


def _plot_position(axes: Any, of: Calibration) -> None:
    places = [place for place, _ in of.placed]
    axes.scatter(places, [score for _, score in of.placed], color=DOT, s=12, alpha=0.4)
    if of.position is not None:
        ends = [min(places), max(places)]
        axes.plot(ends, [end * of.position.mean for end in ends], color=LINE)
        axes.fill_between(
            ends,
            [end * of.position.low for end in ends],
            [end * of.position.high for end in ends],
            color=LINE,
            alpha=0.15,
            linewidth=0,
        )
    axes.set(xlabel="shown earlier or later than in the mean (first to last: 1)", ylabel="scored higher or lower")


def _plot_taus(axes: Any, of: Calibration) -> None:
    axes.hist(of.whole.taus, bins=BINS, range=(-1, 1), color=LINE)
    axes.set(xlabel="Kendall's τ of judge and reference", ylabel="groups", xlim=(-1.03, 1.03))


_PICTURES: dict[str, Callable[[Any, Calibration], None]] = {
    "scores": _plot_scores,
    "position": _plot_position,
    "tau": _plot_taus,
}
