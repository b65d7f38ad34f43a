"""Draw plots of a calibration. matplotlib is in the extra `demo` and may not be installed."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from judge.audit.calibrate import Calibration
from judge.audit.report import title

LINE, DOT = "#1f4e79", "#b45309"
BINS = 20


class NoMatplotlib(Exception):
    """matplotlib is not installed."""


def draw(folder: Path, of: Calibration) -> list[Path]:
    """Write three PNGs and return their paths: scores against references, scores by position, τ of the groups.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        message = "no pictures: matplotlib is not installed (pip install -e '.[demo]' in the repository)"
        raise NoMatplotlib(message) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for name, fill in _PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(6, 4.5), layout="constrained")
        fill(axes, of)
        axes.set_title(title(of), fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        written.append(folder / f"{_file_name(of)}-{name}.png")
        figure.savefig(written[-1], dpi=120)
        pyplot.close(figure)
    return written


def _file_name(of: Calibration) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in (of.policy, of.judge, of.rubric[:8]))


def _scores(axes: Any, of: Calibration) -> None:
    axes.scatter(*(zip(*of.points, strict=True) if of.points else ((), ())), color=DOT, s=12, alpha=0.4)
    axes.set(xlabel="reference", ylabel="score of the judge", ylim=(-0.03, 1.03))


def _position(axes: Any, of: Calibration) -> None:
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


def _taus(axes: Any, of: Calibration) -> None:
    axes.hist(of.whole.taus, bins=BINS, range=(-1, 1), color=LINE)
    axes.set(xlabel="Kendall's τ of judge and reference", ylabel="groups", xlim=(-1.03, 1.03))


_PICTURES: dict[str, Callable[[Any, Calibration], None]] = {"scores": _scores, "position": _position, "tau": _taus}
