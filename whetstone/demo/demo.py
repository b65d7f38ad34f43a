"""`whetstone demo`: show that a stock agent improves because its base_url points at us. Drives the stack from outside.

Everything it shows comes from the database or from the agent's own count; an operator could do everything that it does.
"""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from whetstone.config.settings import Settings, SettingsError
from whetstone.database.engine import connect
from whetstone.demo import curve
from whetstone.demo.agent_process import app, report_of, still_runs
from whetstone.domain import stats
from whetstone.registry.projects import Rewards, Store
from whetstone.stack.data_lock import LOCK, exclusive
from whetstone.stack.stack import Stack, running, usable

AGENT = Path(__file__).with_name("tictactoe") / "agent.py"
SHOWN_STEPS = 6
"""Steps shown above the curve, so that 24 lines are enough; without a terminal, the curve is printed after this many
steps."""
CURVE_LINES = 6
NICENESS = 10
"""The agent's niceness: where the CPU is short it plays less, and steps take no longer."""
ENOUGH_GAMES = 16
"""Fewest games for a version's mean."""
MARK = "demo.txt"
"""A data folder that contains this file belongs to a demo, and the next demo may empty it."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a demo run."""

    steps: int
    games: int
    """Held-out games for each of the two versions."""
    connections: int
    shuffle_rewards: bool
    untagged: bool
    """The agent sends neither game nor group ids: the proxy detects both."""
    pause_s: float
    """Pause of a connection between two games while the policy trains, as in live traffic. Without a pause, sixteen
    connections take both cores of a small machine from the trainer, and play more games between two steps than a step
    may use."""

    def arguments(self, seed: int, model: str) -> list[str]:
        """Return the agent's arguments that do not depend on the phase."""
        untagged = ["--untagged"] if self.untagged else []
        return ["--model", model, "--connections", str(self.connections), "--seed", str(seed), *untagged]


@dataclass(frozen=True)
class Outcome:
    """The result of a demo run."""

    first: stats.Interval
    last: stats.Interval
    gain: stats.Interval
    last_version: int
    failed_requests: int
    seconds: dict[str, float]

    @property
    def rose(self) -> bool:
        """Whether the reward rose significantly and no request failed."""
        return self.last.low > self.first.high and not self.failed_requests


def run(settings: Settings, plan: Plan, console: Console) -> Outcome:
    """Start the stack on an empty data folder, train, measure, stop.

    Raises:
        SettingsError, StartFailed: the stack does not start.
        AppFailed: the agent ended early.
    """
    settings = _for_steps(settings)
    _empty(settings.data, console)
    seconds: dict[str, float] = {}
    began = time.monotonic()
    with running(settings, lambda text: console.print(f"[dim]{text}[/dim]"), console) as stack:
        seconds["start"] = time.monotonic() - began
        store = Store(connect(stack.settings.database_url))
        store.set_policy_state(settings.project, settings.policy, "training")
        console.print(f"the stack is up: {stack.proxy_url}/v1; the agent plays, {settings.policy} learns")
        began = time.monotonic()
        report = _train(stack, store, plan, console)
        seconds["train"] = time.monotonic() - began
        store.set_policy_state(settings.project, settings.policy, "paused")
        steps = store.steps(settings.project, settings.policy)
        last_version = next(row["live_version"] for row in store.policies(settings.project))
        began = time.monotonic()
        won = {}
        for version in (0, last_version):
            name = f"{settings.policy}@v{version}"
            console.print(f"[dim]{plan.games} held-out games with {name}[/dim]")
            arguments = [*plan.arguments(settings.seed, name), "--split", "eval", "--games", str(plan.games)]
            with app(stack, AGENT, arguments) as agent:
                ended = report_of(agent, stack)
            won[version] = ended["won"]
            report["failed_requests"] += ended["failed_requests"]
        seconds["measure"] = time.monotonic() - began
        outcome = Outcome(
            first=stats.share(won[0]),
            last=stats.share(won[last_version]),
            gain=stats.gain(won[0], won[last_version]),
            last_version=last_version,
            failed_requests=report["failed_requests"],
            seconds=seconds,
        )
        _show(outcome, steps, store, settings, plan, console)
    return outcome


def _for_steps(settings: Settings) -> Settings:
    """Let the training worker use the CPU without yielding, unless its niceness is set: no app waits here."""
    if "niceness" in settings.trainer.model_fields_set:
        return settings
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"niceness": 0})})


def _train(stack: Stack, store: Store, plan: Plan, console: Console) -> dict[str, Any]:
    """Let the agent play until the policy has taken its steps; return the agent's own report."""
    settings = stack.settings
    progress = Progress(TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    bar = progress.add_task("steps", total=plan.steps)
    phase = ["--games", "0", "--pause-s", str(plan.pause_s), *(["--shuffle-rewards"] if plan.shuffle_rewards else [])]
    with (
        app(stack, AGENT, [*plan.arguments(settings.seed, settings.policy), *phase], NICENESS) as agent,
        Live(console=console, refresh_per_second=2, transient=not console.is_terminal) as live,
    ):
        printed = 0
        while True:
            stack.watch()
            ended = [step for step in store.steps(settings.project, settings.policy) if step["ended_at"] is not None]
            rewards = store.rewards_by_version(settings.project, settings.policy)
            if console.is_terminal:
                progress.update(bar, completed=min(len(ended), plan.steps))
                live.update(Group(_steps_table(ended[-SHOWN_STEPS:], rewards), *_curve(rewards, console), progress))
            else:
                for step in ended[printed:]:
                    console.print(_line(step, rewards), highlight=False, soft_wrap=True)
                    if step["number"] % SHOWN_STEPS == 0:
                        console.print(*_curve(rewards, console), sep="\n")
                printed = len(ended)
            if len(ended) >= plan.steps:
                break
            still_runs(agent)
            time.sleep(0.5)
        agent.terminate()
        report = report_of(agent, stack)
    if not console.is_terminal:
        console.print(*_curve(rewards, console), sep="\n")
    return report


def _empty(data: Path, console: Console) -> None:
    """Remove what an earlier demo left, and nothing else.

    Raises:
        SettingsError: the folder is not a demo's, a stack runs on it, or it cannot be written.
    """
    data = usable(data)
    left = [path for path in data.iterdir() if path.name != LOCK]
    if left and not (data / MARK).is_file():
        raise SettingsError(
            f"{data} holds something else than a demo's data (no {MARK} is in it): remove it yourself, or choose "
            "another folder with --data"
        )
    with exclusive(data):
        if left:
            console.print(f"[dim]removing the data of the last demo in {data}[/dim]")
        # The mark is removed last, so that a half-emptied folder can be emptied later.
        for path in sorted(left, key=lambda path: path.name == MARK):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (data / MARK).write_text("`whetstone demo` empties this folder when it starts.\n", encoding="utf-8")


_COLUMNS = ("step", "reward", "spread", "tokens/s", "live", "k3", "kl", "seconds")


def _cells(step: dict[str, Any], rewards: dict[int, Rewards]) -> list[str]:
    def number(value: float | None, shape: str) -> str:
        return "–" if value is None else format(value, shape)

    games = rewards.get(step["version_in"])
    return [
        str(step["number"]),
        number(games.mean if games else None, ".3f"),
        f"±{number(games.spread if games else None, '.3f')}",
        number(step["tokens_per_s"], ".0f"),
        f"v{step['version_out']}" if step["state"] == "promoted" else step["state"],
        number(step["mismatch_k3"], ".1e"),
        number(step["kl"], ".3f"),
        number(step["seconds"], ".1f"),
    ]


def _steps_table(steps: list[dict[str, Any]], rewards: dict[int, Rewards]) -> Table:
    table = Table(*_COLUMNS, title="GRPO steps; reward: games of the version before the step", title_justify="left")
    for step in steps:
        table.add_row(*_cells(step, rewards))
    return table


def _curve(rewards: dict[int, Rewards], console: Console) -> list[Text]:
    """Return the curve of mean reward by version."""
    lines = curve.in_text(_means(rewards), console.width, CURVE_LINES)
    return [Text("reward by version (· each, ● running mean)", style="bold"), *map(Text, lines)] if lines else []


def _means(rewards: dict[int, Rewards]) -> list[float]:
    """Return the mean reward of each version that has played enough games."""
    return [rewards[version].mean for version in sorted(rewards) if rewards[version].trajectories >= ENOUGH_GAMES]


def _line(step: dict[str, Any], rewards: dict[int, Rewards]) -> str:
    return "  ".join(f"{name} {cell}" for name, cell in zip(_COLUMNS, _cells(step, rewards), strict=True))


def _show(
    outcome: Outcome, steps: list[dict[str, Any]], store: Store, settings: Settings, plan: Plan, console: Console
) -> None:
    names = f"{settings.policy}@v0", f"{settings.policy}@v{outcome.last_version}"
    table = Table("held-out games", "won", "95 % interval", title=f"{plan.games} openings, the same for both")
    for name, interval in zip(names, (outcome.first, outcome.last), strict=True):
        table.add_row(name, f"{interval.mean:.1%}", f"{interval.low:.1%} to {interval.high:.1%}")
    table.add_row("gain", f"{outcome.gain.mean:+.1%}", f"{outcome.gain.low:+.1%} to {outcome.gain.high:+.1%}")
    console.print(table)
    picture = settings.data / "rewards.png"
    title = "rewards shuffled: the control" if plan.shuffle_rewards else f"{settings.policy} learns tic-tac-toe"
    curve.draw(
        picture,
        _means(store.rewards_by_version(settings.project, settings.policy)),
        list(zip(names, (outcome.first, outcome.last), strict=True)),
        title,
    )
    completions = store.completions_by_status(settings.project)
    console.print(
        f"{sum(completions.values())} completions recorded ({completions}), {outcome.failed_requests} failed requests, "
        f"{len(steps)} steps; seconds: {', '.join(f'{part} {took:.0f}' for part, took in outcome.seconds.items())}"
    )
    console.print(f"the curve: {picture}")
    ask = f"{Path(sys.executable).with_name('whetstone')} sql --data {settings.data}"
    console.print("look further:", *(f'\n  {ask} "{sql}"' for sql in QUERIES), soft_wrap=True, highlight=False)
    verdict = "[bold green]the reward rose: the intervals do not overlap[/bold green]"
    if not outcome.rose:
        overlap = "the reward did not rise: the intervals overlap"
        verdict = f"[bold red]{'requests of the agent failed' if outcome.failed_requests else overlap}[/bold red]"
    console.print(verdict)


QUERIES = (
    "SELECT step, version_in, version_out, reward_mean, kl, mismatch_k3, seconds FROM admin_steps",
    "SELECT why_not_trained, split, state, count(*) FROM admin_trajectories GROUP BY 1, 2, 3",
    "SELECT policy_version, turn, response_text, token_ids, inference_logprobs FROM admin_completions"
    " ORDER BY created_at DESC LIMIT 10",
)
"""Example queries that are printed at the end."""
