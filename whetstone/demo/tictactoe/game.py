"""Tic-tac-toe as text: the rules, and an opponent that plays at random. Knows no client and no model.

A board is nine characters, one a cell, row by row. A free cell shows its own number, a taken one X (the agent) or
O (the opponent), so a legal move is always a character that is there to be copied: "1X3" "4O6" "789".
"""

import random

EMPTY = "123456789"
LINES = ("123", "456", "789", "147", "258", "369", "159", "357")
SYSTEM = "Tic-tac-toe. You are X. Name a free cell."


def free(board: str) -> list[str]:
    """The numbers of the free cells, in order; each is a legal move."""
    return [cell for cell in board if cell.isdigit()]


def place(board: str, cell: str, mark: str) -> str:
    """The board after `mark` took the free `cell`."""
    return board.replace(cell, mark)


def result(board: str) -> str | None:
    """Who has a line ("X" or "O"), "draw" on a full board without one, None while the game goes on."""
    for line in LINES:
        a, b, c = (board[int(cell) - 1] for cell in line)
        if a == b == c:
            return a
    return None if free(board) else "draw"


def reply(board: str, opening: str) -> str:
    """The board after the opponent's move: uniform over openings, and fixed by the opening and what is on the board.

    Attempts at one opening therefore differ only by what the agent does.
    """
    return place(board, random.Random(f"{opening}:{board}").choice(free(board)), "O")


def after(board: str, cell: str, opening: str) -> str:
    """The board that the agent sees once it took `cell`: with the opponent's reply, unless the game is over."""
    board = place(board, cell, "X")
    return board if result(board) else reply(board, opening)


def first_board(number: int, opening: str) -> str:
    """The board the agent sees first. The opponent opens every second game."""
    return reply(EMPTY, opening) if number % 2 else EMPTY


def opening_name(split: str, seed: int, number: int) -> str:
    """What the opponent's moves depend on. The split is part of it: held-out games are never trained on."""
    return f"{split}:{seed}:{number}"
