"""Draw the reward by version of a run, as text while it runs and as a picture at its end."""

from collections.abc import Sequence
from pathlib import Path

from whetstone.domain.stats import Interval

SMOOTHED_OVER = 9
"""Versions that the bold line averages."""


def smooth(rewards: Sequence[float]) -> list[float]:
    """Return the running mean: of each version and up to SMOOTHED_OVER // 2 versions before and after it."""
    half = SMOOTHED_OVER // 2
    around = [rewards[max(0, place - half) : place + half + 1] for place in range(len(rewards))]
    return [sum(window) / len(window) for window in around]


def in_text(rewards: Sequence[float], width: int, height: int = 8) -> list[str]:
    """Return lines of text: a dot for each version's mean reward, a bullet for the running mean; empty without rewards.

    If there are more versions than columns, versions share columns.
    """
    if not rewards:
        return []
    columns = min(len(rewards), max(1, width - 8))
    places = [column * len(rewards) // columns for column in range(columns)]
    means = smooth(rewards)
    low, high = min(rewards), max(rewards)
    room = max(high - low, 0.05)

    def row(value: float) -> int:
        return round((value - low) / room * (height - 1))

    grid = [[" "] * columns for _ in range(height)]
    for column, place in enumerate(places):
        grid[row(rewards[place])][column] = "·"
        grid[row(means[place])][column] = "●"
    marks = [f"{low + room * line / (height - 1):6.2f} ┤" for line in range(height)]
    lines = [mark + "".join(cells).rstrip() for mark, cells in zip(marks, grid, strict=True)]
    last = f" v{len(rewards) - 1}" if len(rewards) > 1 else ""
    return [*reversed(lines), "       └" + "─" * columns, "        v0" + last.rjust(columns - 2)]


def draw(
    path: Path,
    rewards: Sequence[float],
    held_out: Sequence[tuple[str, Interval]],
    title: str,
    attempts: str = "training games of each version",
    share: str = "share of games won",
) -> None:
    """Write a PNG: thin line for each version's mean reward, bold line for its running mean, bands for held-out
    shares. `attempts` and `share` label the thin line and the axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(rewards, color="#9aa5b1", linewidth=1, label=attempts)
    axes.plot(smooth(rewards), color="#1f4e79", linewidth=2.5)
    for (name, interval), colour in zip(held_out, ("#b45309", "#15803d", "#6d28d9"), strict=False):
        axes.axhspan(interval.low, interval.high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(interval.mean, color=colour, linestyle="--", label=f"{name}, held out: {interval.mean:.1%}")
    axes.set(xlabel="policy version (GRPO steps taken)", ylabel=share, ylim=(0, 1), title=title)
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
