"""The questions of the app, and what its users think of an answer. Knows the rules of the demo's game.py; no client.

A question is one board at which X is to move. A user likes a hint that names a cell on as many lines that O has not
touched as any other free cell is; that is taste, not perfect play, and nothing the starter model was taught.
"""

import random
import sys
from functools import cache
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

SYSTEM = game.SYSTEM
HELD_OUT = 600
"""Boards that are never trained on."""


def open_lines(board: str, cell: str) -> int:
    """How many lines through the cell have no O."""
    return sum(cell in line and "O" not in (board[int(place) - 1] for place in line) for line in game.LINES)


def liked(board: str) -> set[str]:
    """The cells that users like."""
    lines = {cell: open_lines(board, cell) for cell in game.free(board)}
    return {cell for cell, count in lines.items() if count == max(lines.values())}


@cache
def boards() -> dict[str, list[str]]:
    """By split ("train", "eval"), in random but always the same order: no board is in both.

    They are all unfinished boards with as many X as O, or one O more, at which some free cell is not liked.
    """
    every = []
    for marks in product(" XO", repeat=9):
        board = "".join(str(cell) if mark == " " else mark for cell, mark in enumerate(marks, 1))
        in_turn = marks.count("O") - marks.count("X") in (0, 1)
        if in_turn and game.result(board) is None and len(liked(board)) < len(game.free(board)):
            every.append(board)
    random.Random("hints").shuffle(every)
    return {"eval": every[:HELD_OUT], "train": every[HELD_OUT:]}


def question(split: str, seed: int, number: int) -> str:
    """The board of a question: held out each in its turn, in training drawn at random."""
    of_split = boards()[split]
    return of_split[number] if split == "eval" else random.Random(f"{seed}:{number}").choice(of_split)
