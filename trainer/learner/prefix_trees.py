"""Build trees from rows, so that a prefix that several rows share is read once. Pure: works on token ids.

A forest is one flat sequence of T tokens, cut into pieces. A piece continues its parent, and a token sees what comes
before it in its own piece and all of its parents' pieces: exactly what it sees in its row. Attention is causal, so a
shared prefix has the same hidden states in each of its rows, and the gradients of all of them meet there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

WORTH_SHARING = 32
"""Tokens. A shorter prefix is read again by each row: one more piece costs as much in every layer."""
ROOT = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `end` of the flat sequence."""

    start: int
    end: int
    parent: int
    """Index of the piece that it continues; ROOT for none. Parents come first."""

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.end - self.start


@dataclass(slots=True)
class Forest:
    """One flat sequence that several rows are read from.

    A piece comes before all that continues it, and nothing else comes between these.
    """

    token_ids_T: Ids
    position_ids_T: Ids
    """Each token's position in its rows."""
    pieces: list[Piece] = field(default_factory=list)
    last_piece: list[int] = field(default_factory=list)
    """For each row, the piece that it ends in."""

    def path(self, piece: int) -> list[int]:
        """Return the piece and all pieces that it continues, the first of them first."""
        path = []
        while piece != ROOT:
            path.append(piece)
            piece = self.pieces[piece].parent
        return path[::-1]

    def places(self, row: int) -> Ids:
        """Return the positions of the row's tokens in the flat sequence."""
        pieces = [self.pieces[place] for place in self.path(self.last_piece[row])]
        return np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])

    def ends(self) -> Ids:
        """Return, for each token k, the end of the tokens that see it: k up to there.

        A piece is followed by all that continues it, so what sees a token is one interval.
        """
        ends = [piece.end for piece in self.pieces]
        for place in range(len(ends) - 1, -1, -1):
            if (parent := self.pieces[place].parent) != ROOT:
                ends[parent] = max(ends[parent], ends[place])
        return np.repeat(ids(ends), [piece.length for piece in self.pieces])


def ids(token_ids: Sequence[int]) -> Ids:
    """Return token ids as an array."""
    return np.asarray(token_ids, dtype=np.int64)


def common_prefix(one: Ids, other: Ids) -> int:
    """Return the number of tokens that both begin with."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def batches(rows: Sequence[Ids], budget_tokens: int) -> list[list[int]]:
    """Return groups of row positions such that the forest of each group stays within the budget.

    Rows are taken in the order of their token ids, so that rows with a common prefix stay together, and the same rows
    always make the same groups. A row above the budget is alone.
    """
    order = in_order(rows)
    groups = []
    while order:
        group: list[int] = []
        costs: list[int] = []
        used = 0
        for place in order:
            shared = common_prefix(rows[group[-1]], rows[place]) if group else 0
            cost = len(rows[place]) - (shared if shared >= WORTH_SHARING else 0)
            if group and used + cost > budget_tokens:
                break
            group.append(place)
            costs.append(cost)
            used += cost
        # A fork that is too short for a piece is read again; the costs do not include that.
        while len(group) > 1 and (over := len(forest([rows[at] for at in group]).token_ids_T) - budget_tokens) > 0:
            while len(group) > 1 and over > 0:
                group.pop()
                over -= max(1, costs.pop())
        groups.append(group)
        order = order[len(group) :]
    return groups


def in_order(rows: Sequence[Ids]) -> list[int]:
    """Return positions of the rows in the order of their token ids; equal rows keep their order."""
    return sorted(range(len(rows)), key=lambda place: rows[place].astype(">i8").tobytes())


def forest(rows: Sequence[Ids]) -> Forest:
    """Return the rows as one flat sequence. There is at least one row, and no row is empty."""
    order = in_order(rows)
    shared = [common_prefix(rows[one], rows[other]) for one, other in pairwise(order)]
    pieces: list[Piece] = []
    taken: list[tuple[Ids, int]] = []
    last_piece = [ROOT] * len(rows)
    end = 0
    # Ranges of `order` whose rows have been read up to `depth`, in `parent`.
    open_ranges = [(0, len(order), 0, ROOT)]
    while open_ranges:
        first, beyond, depth, parent = open_ranges.pop()
        row = rows[order[first]]
        common = min(shared[first : beyond - 1], default=len(row))
        if (common - depth) * max(1, beyond - first - 1) >= (1 if beyond - first == 1 else WORTH_SHARING):
            pieces.append(Piece(end, end + common - depth, parent))
            taken.append((row[depth:common], depth))
            end += common - depth
            depth, parent = common, len(pieces) - 1
        if beyond - first == 1:
            last_piece[order[first]] = parent
            continue
        cuts = [first, *(at + 1 for at in range(first, beyond - 1) if shared[at] == common), beyond]
        open_ranges += [(a, b, depth, parent) for a, b in zip(cuts[-2::-1], cuts[:0:-1], strict=True)]
    return Forest(
        token_ids_T=np.concatenate([ids for ids, _ in taken]),
        position_ids_T=np.concatenate([np.arange(depth, depth + len(ids)) for ids, depth in taken]),
        pieces=pieces,
        last_piece=last_piece,
    )
