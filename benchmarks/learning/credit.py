"""How many attempts it takes until one turn of several is right: rewarded as a step, or as the whole attempt.

A walk has sixteen turns, of one token each; only the answer at one of them matters. In process, with the trainer's own
rows, advantages and learner on the starter model: no server is needed. Both ways have the same settings, seeds and
attempts in a step. Exit 0 only if with credit by step at most half as many attempts were needed, for each seed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from benchmarks.kit.check import verdict
from benchmarks.kit.options import parser_of
from benchmarks.learning.games.player import Game, Player, Turn, game
from trainer.domain.claims import Member
from trainer.domain.row_builder import build_rows
from trainer.learner.learner import Learner
from whetstone.config.settings import STARTER, Settings, load

TURNS = 16
BOARD = game.first_board(0, game.opening_name("train", 0, 0))
RIGHT = "7"
"""The cell that earns 1."""
GROUPS, MEMBERS = 2, 4
"""In a step. All groups are walks of the same kind. With more in a step the other turns' noise averages out."""
ENOUGH = 0.9
EVALUATED = 200
"""Walks that measure the success of a version; they are not trained on."""
MOST_SHARE = 0.5
LEARNING_RATE = 1e-3
"""What `up` chooses for a model of this size."""


class Walker(Player):
    """The policy on its walks, many at once."""

    def right(self) -> int:
        """Return the id of the answer that earns 1."""
        (right,) = self._tokenizer.encode(RIGHT, add_special_tokens=False)
        return int(right)

    @torch.inference_mode()
    def walk(self, number: int, turns: int | None = None) -> list[list[Turn]]:
        """Return the first turns of so many walks; None: all of them."""
        walks: list[list[Turn]] = [[] for _ in range(number)]
        cache = DynamicCache()
        prompts: list[tuple[int, ...]] = [()] * number
        for turn in range(TURNS if turns is None else turns):
            asked = self._asked(turn)
            shown = [(*((walk[-1][1],) if walk else ()), *asked) for walk in walks]
            logits_NV = self._model(torch.tensor(shown), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            logprobs_NV = logits_NV[:, -1].float().log_softmax(-1)
            prompts = [(*prompt, *added) for prompt, added in zip(prompts, shown, strict=True)]
            for walk, prompt, (answer, logprob) in zip(walks, prompts, self._answers(logprobs_NV), strict=True):
                walk.append((prompt, answer, logprob))
        return walks

    def _asked(self, turn: int) -> tuple[int, ...]:
        """Return the ids that ask for the turn's answer: always the same board of the demo's game."""
        return self._shown(BOARD, first=turn == 0)


def member(
    name: str, group: str, walk: Sequence[Turn], decisive: int, right: int, version: int, by_step: bool
) -> Member:
    """Return a walk as a step's trajectory."""
    whole = Game(name, group, "", BOARD, turns=list(walk), won=walk[decisive][1] == right).member(version)
    return replace(whole, step_rewards={decisive: whole.reward} if by_step else {})


def learn(settings: Settings, decisive: int, by_step: bool, most_steps: int) -> tuple[int | None, list[float]]:
    """Train until enough walks are right; return the attempts that were trained on, None if it was not reached, and
    the success after each step."""
    walker, learner = Walker(STARTER, settings.seed), Learner.fresh(str(STARTER), settings.trainer, settings.seed)
    right, curve = walker.right(), list[float]()
    for version in range(most_steps):
        walks = walker.walk(GROUPS * MEMBERS)
        members = [
            member(f"{version}.{number}", str(number // MEMBERS), walk, decisive, right, version, by_step)
            for number, walk in enumerate(walks)
        ]
        rows = build_rows(members, settings.trainer.max_row_tokens, settings.trainer.advantage_scale).rows
        if rows:
            learner.step(rows, version)
            walker.load(learner.files())
        curve.append(sum(walk[decisive][1] == right for walk in walker.walk(EVALUATED, decisive + 1)) / EVALUATED)
        if curve[-1] >= ENOUGH:
            return (version + 1) * GROUPS * MEMBERS, curve
    return None, curve


def main() -> int:
    parser = parser_of(
        "Attempts until one turn of several is right, rewarded as a step and as the whole attempt.",
        {
            "--seeds": {"type": int, "default": 3, "help": "how many, from 0 on"},
            "--decisive": {"type": int, "default": 0, "help": f"the turn that matters, from 0 to {TURNS - 1}"},
            "--most-steps": {"type": int, "default": 200, "help": "where a run ends without success"},
            "--json": {"type": Path, "help": "file for all figures"},
        },
    )
    args, console = parser.parse_args(), Console(soft_wrap=True, highlight=False)
    table = Table("seed", "rewarded as a step", "as the whole attempt", "share", title=f"attempts until {ENOUGH:.0%}")
    figures: list[dict[str, Any]] = []
    faults = []
    for seed in range(args.seeds):
        settings = load(environment={}, seed=seed, trainer__threads=1, trainer__learning_rate=LEARNING_RATE)
        by_step, step_curve = learn(settings, args.decisive, True, args.most_steps)
        whole, whole_curve = learn(settings, args.decisive, False, args.most_steps)
        at_least = whole or args.most_steps * GROUPS * MEMBERS
        share = None if by_step is None else by_step / at_least
        if share is None or share > MOST_SHARE:
            faults.append(f"seed {seed}: {by_step} attempts with credit by step, {whole} without")
        table.add_row(
            str(seed), str(by_step), str(whole or f"over {at_least}"), "" if share is None else f"{share:.2f}"
        )
        figures.append({"seed": seed, "by_step": by_step, "whole": whole, "curves": [step_curve, whole_curve]})
        console.print(f"seed {seed}: {by_step} and {whole}")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(figures) + "\n", encoding="utf-8")
    return verdict(faults, console)


if __name__ == "__main__":
    sys.exit(main())
