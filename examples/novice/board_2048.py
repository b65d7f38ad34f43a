"""Boards of the small 2048, each with a move that is drawn uniformly from the legal ones. Nothing here plays well."""

import random
import sys
from pathlib import Path

from conversation import Conversation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "2048"))

import tiles

FORM = tiles.FORMS["small"]
WORDS: tuple[str, ...] = (*tiles.MOVES, "Slide", "and", "merge", "Reach")


def random_board(rng: random.Random) -> tiles.Board:
    """Return a board of any number of tiles on which a move is legal. It is no start of a game."""
    while True:
        places = FORM.rows * FORM.columns
        count = rng.randint(2, places)
        cells = [rng.randint(1, FORM.target - 1) for _ in range(count)] + [0] * (places - count)
        rng.shuffle(cells)
        board = tuple(tuple(cells[i : i + FORM.columns]) for i in range(0, places, FORM.columns))
        if tiles.legal_moves(board) and sorted(filter(None, cells)) != sorted(FORM.start):
            return board


def conversation(rng: random.Random) -> Conversation:
    """Return one move of a game."""
    board = random_board(rng)
    moves = tiles.legal_moves(board)
    messages = [
        {"role": "system", "content": FORM.system()},
        {"role": "user", "content": FORM.text(board)},
        {"role": "assistant", "content": rng.choice(moves)},
    ]
    return Conversation(messages, choices=[moves])
