"""2048: the moves, the new tiles, and what a game is worth.

A tile is stored as its power of two: 5 is the tile 32, 0 an empty cell. All that is random comes from a function from
a purpose to a generator. So the same task has the same start, and the same luck in its k-th new tile.
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Board = tuple[tuple[int, ...], ...]
Draw = Callable[[str], random.Random]
"""The generator of a task for a purpose: equal for all attempts at the task."""

MOVES = ("up", "down", "left", "right")
SHARE_OF_FOURS = 0.1
"""How often a new tile is 4 instead of 2."""
HELD_OUT = 5
"""One start in so many is never trained on."""

RULES = (
    "You play 2048 on a board of {rows} rows and {columns} columns. A dot is an empty cell. A move slides all tiles to "
    "one side, and two equal tiles that meet become one of twice the value. Then a new tile, 2 or 4, appears in an "
    "empty cell. Reach the tile {target}. Answer with one of the moves that are listed, and with nothing else."
)


@dataclass(frozen=True)
class Form:
    """A board, its goal, and how a model sees it."""

    rows: int
    columns: int
    target: int
    """The power of the tile that wins."""
    start: tuple[int, ...]
    """The powers of the tiles at the start."""
    digits: bool
    """Whether a cell is shown as the digit of its power, one token, instead of its value."""
    max_tokens: int
    """Longest answer."""

    def system(self) -> str:
        """Return the system message."""
        if self.digits:
            return f"Slide and merge. Reach {self.target}."
        return RULES.format(rows=self.rows, columns=self.columns, target=2**self.target)

    def text(self, board: Board) -> str:
        """Return what the model sees of a board: its rows, then the moves that are legal."""
        moves = legal_moves(board)
        if self.digits:
            return "\n".join(["".join(map(str, row)) for row in board] + [" ".join(moves)])
        rows = [" ".join(str(2**tile) if tile else "." for tile in row) for row in board]
        return "\n".join([*rows, f"Moves: {', '.join(moves)}"])


FORMS = {
    "small": Form(rows=2, columns=4, target=5, start=(4, 3, 2, 2, 1), digits=True, max_tokens=4),
    "full": Form(rows=4, columns=4, target=11, start=(1, 1), digits=False, max_tokens=16),
}


def _squeezed(tiles: list[int]) -> list[int]:
    """Return a line of tiles after it slid to its beginning. A tile merges once."""
    line: list[int] = []
    merged = True
    for tile in filter(None, tiles):
        if not merged and line[-1] == tile:
            line[-1], merged = tile + 1, True
        else:
            line.append(tile)
            merged = False
    return line + [0] * (len(tiles) - len(line))


def _transposed(board: Board) -> Board:
    return tuple(zip(*board, strict=True))


def slid(board: Board, move: str) -> Board:
    """Return the board after a move, before the new tile."""
    if move in ("up", "down"):
        return _transposed(slid(_transposed(board), "left" if move == "up" else "right"))
    step = 1 if move == "left" else -1
    return tuple(tuple(_squeezed(list(row[::step]))[::step]) for row in board)


def legal_moves(board: Board) -> list[str]:
    """Return the moves that change the board."""
    return [move for move in MOVES if slid(board, move) != board]


def with_tile(board: Board, rng: random.Random) -> Board:
    """Return the board with a new tile. Equal luck means the same place among the empty cells, in reading order."""
    empty = [(i, j) for i, row in enumerate(board) for j, tile in enumerate(row) if not tile]
    row, column = empty[int(rng.random() * len(empty))]
    new = 2 if rng.random() < SHARE_OF_FOURS else 1
    return tuple(
        tuple(new if (i, j) == (row, column) else tile for j, tile in enumerate(tiles)) for i, tiles in enumerate(board)
    )


def is_held_out(board: Board) -> bool:
    """Return whether games that start so belong to the split eval: drawn once for each start."""
    return random.Random(f"start {board}").randrange(HELD_OUT) == 0


def start(form: Form, split: str, rng: random.Random) -> Board:
    """Return the first board of a task. No start is in both splits."""
    while True:
        cells = [0] * (form.rows * form.columns)
        for place, tile in zip(rng.sample(range(len(cells)), len(form.start)), form.start, strict=True):
            cells[place] = tile
        board = tuple(tuple(cells[i : i + form.columns]) for i in range(0, len(cells), form.columns))
        if is_held_out(board) == (split == "eval"):
            return board


class Game:
    """A game of one attempt."""

    def __init__(self, form: Form, split: str, draw: Draw) -> None:
        self.form, self.draw, self.moves = form, draw, 0
        self.board = start(form, split, draw("start"))

    @property
    def largest(self) -> int:
        return max(map(max, self.board))

    @property
    def won(self) -> bool:
        return self.largest >= self.form.target

    @property
    def over(self) -> bool:
        return self.won or not legal_moves(self.board)

    def text(self) -> str:
        return self.form.text(self.board)

    def move(self, move: str) -> bool:
        """Make a move, and add the new tile unless it won; return whether the move was legal."""
        if move not in legal_moves(self.board):
            return False
        self.board = slid(self.board, move)
        self.moves += 1
        if not self.won:
            self.board = with_tile(self.board, self.draw(f"tile {self.moves}"))
        return True

    @property
    def share(self) -> float:
        """The share of the way to the target: the mean of log2 of the largest tile and of the sum, by its goals."""
        total = sum(2**tile for row in self.board for tile in row if tile)
        by_sum = math.log2(total) / (self.form.target + 1)
        return 1.0 if self.won else (self.largest / self.form.target + min(1.0, by_sum)) / 2


def move_in(answer: str) -> str:
    """Return an answer's last word: the move, whatever stands before it."""
    words: list[str] = re.findall("[a-z]+", answer.lower())
    return words[-1] if words else ""
