"""The picture of a run: reward by version, and the held-out games before and after. Draws; measures nothing."""

from collections.abc import Sequence
from pathlib import Path

from whetstone.intervals import Interval

SMOOTHED_OVER = 9
"""Versions that the bold line averages."""


def draw(path: Path, rewards: Sequence[float], held_out: Sequence[tuple[str, Interval]], title: str) -> None:
    """Write a PNG: thin line each version's mean reward, bold its running mean, bands the held-out shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(rewards, color="#9aa5b1", linewidth=1, label="training games of each version")
    if len(rewards) >= SMOOTHED_OVER:
        half = SMOOTHED_OVER // 2
        smooth = [sum(rewards[i - half : i + half + 1]) / SMOOTHED_OVER for i in range(half, len(rewards) - half)]
        axes.plot(range(half, len(rewards) - half), smooth, color="#1f4e79", linewidth=2.5)
    for (name, interval), colour in zip(held_out, ("#b45309", "#15803d"), strict=False):
        axes.axhspan(interval.low, interval.high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(interval.mean, color=colour, linestyle="--", label=f"{name}, held out: {interval.mean:.1%}")
    axes.set(xlabel="policy version (GRPO steps taken)", ylabel="share of games won", ylim=(0, 1), title=title)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
