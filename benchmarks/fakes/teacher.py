"""An OpenAI-compatible server that plays tic-tac-toe by rule: it wins if it can, blocks if it must.

It answers the board in the last message, in the form of whetstone/demo/tictactoe/game.py.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.fakes.json_server import Handler, Server, chat_answer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

BY_WORTH = "519372846"
"""Order of cells where there is nothing to win or block: the middle, the corners, the edges."""


def move(board: str) -> str:
    """Return a cell that makes a line, else one that blocks the opponent's line, else the best free one."""
    for mark in "XO":
        for cell in game.free(board):
            if game.result(game.place(board, cell, mark)) == mark:
                return cell
    return next(cell for cell in BY_WORTH if cell in board)


class Teacher(Server):
    """Answers at `url` until its `with` ends."""

    def __init__(self) -> None:
        super().__init__(_Handler, base="/v1")


class _Handler(Handler):
    def respond(self, body: dict[str, Any]) -> None:
        self.whole(200, chat_answer(move(body["messages"][-1]["content"]), body["model"]))
