"""Train the demo's policy without a server: games in process, the trainer's own rows, advantages and learner.

Each step plays new groups of games with the last version, until enough of them have different rewards, and trains on
them. So a change of the recipe is tried in minutes, on one core, without anything of the stack. Held-out games are
those of the demo. Prints a line of JSON for each measurement, and one for the whole run.
"""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.kit.options import parser_of
from benchmarks.kit.process import ROOT
from benchmarks.learning.games.player import Game, Player, games
from trainer.domain.row_builder import build_rows
from trainer.learner.learner import Learner
from whetstone.config.settings import Settings, load

STARTER = ROOT / "whetstone" / "starter"


def settings_of(changes: list[str], seed: int) -> Settings:
    """Return the demo's settings with changes of the trainer's, each as NAME=VALUE.

    Raises:
        SettingsError: there is no such setting, or it cannot have this value.
    """
    names = (change.partition("=") for change in changes)
    environment = {f"WHETSTONE_TRAINER__{name.upper()}": value for name, _, value in names}
    return load(environment=environment, seed=seed)


class Run:
    """A policy in training."""

    def __init__(self, model: Path, settings: Settings, group_size: int) -> None:
        self._settings, self._group_size = settings, group_size
        self._player = Player(model, settings.seed)
        self._learner = Learner.fresh(model, settings.trainer, settings.seed)
        self._numbers = count()
        self.played = 0

    def step(self, version: int) -> dict[str, Any]:
        """Play, train, and load the new version; return the step's figures."""
        played = [one for group in self._groups() for one in group]
        self.played += len(played)
        trainer = self._settings.trainer
        members = [one.member(version) for one in played]
        rows = build_rows(members, trainer.max_row_tokens, trainer.advantage_scale, baseline=trainer.baseline).rows
        figures = self._learner.step(rows, version)
        self._player.load(self._learner.files())
        return {
            "reward": sum(one.won for one in played) / len(played),
            "entropy": figures.entropy,
            "masked": figures.masked_share,
            "norm": figures.grad_norm,
            "read": figures.read_tokens,
        }

    def held_out(self, number: int, greedy: bool = False) -> float:
        """Return the share of so many held-out games that the last version wins."""
        held_out = games("eval", self._settings.seed, range(number), group_size=1)
        self._player.play(held_out, greedy)
        return sum(one.won for one in held_out) / number

    def _groups(self) -> Iterator[list[Game]]:
        """Yield new groups until as many of them have different rewards as a step waits for."""
        missing = self._settings.trainer.groups_per_step
        while missing > 0:
            numbers = islice(self._numbers, missing * self._group_size)
            played = games("train", self._settings.seed, numbers, self._group_size)
            self._player.play(played)
            groups = defaultdict(list)
            for one in played:
                groups[one.group].append(one)
            missing -= sum(len({one.won for one in group}) > 1 for group in groups.values())
            yield from groups.values()


def main() -> int:
    parser = parser_of(
        "The demo's learning curve without its servers.",
        {
            "--steps": {"type": int, "default": 32, "help": "steps to take"},
            "--group-size": {"type": int, "default": 8, "help": "games that share an opening"},
            "--games": {"type": int, "default": 800, "help": "held-out games for each measurement"},
            "--every": {"type": int, "default": 16, "help": "steps between two measurements"},
            "--seed": {"type": int, "default": 0, "help": "of the adapter, the sampling and the openings"},
            "--model": {"type": Path, "default": STARTER, "help": "the folder of the base model"},
            "--set": {"action": "append", "default": [], "metavar": "NAME=VALUE", "help": "a setting of the trainer"},
            "--json": {"type": Path, "help": "a file to which the result is added as a line"},
        },
    )
    args, console, began = parser.parse_args(), Console(soft_wrap=True, highlight=False), time.monotonic()
    run = Run(args.model, settings_of(args.set, args.seed), args.group_size)
    curve = [{"step": 0, "games": 0, "won": run.held_out(args.games)}]
    console.print_json(data=curve[-1], indent=None)
    for step in range(args.steps):
        figures = run.step(step)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            curve.append({"step": step + 1, "games": run.played, "won": run.held_out(args.games), **figures})
            console.print_json(data=curve[-1], indent=None)
    result = {
        "seed": args.seed,
        "group_size": args.group_size,
        "set": args.set,
        "curve": curve,
        "greedy": run.held_out(args.games, greedy=True),
        "seconds": round(time.monotonic() - began, 1),
    }
    console.print_json(data=result, indent=None)
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(result)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
