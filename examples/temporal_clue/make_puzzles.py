"""Make the puzzles in `puzzles/` with OR-Tools' CP-SAT (`pip install ortools`). Equal seeds make equal puzzles.

A puzzle is a world and clues that are true in it: as many as make its answer the only one, and none that is not needed.
"""

import argparse
import itertools
import json
import random

from clues import FOLDER, Clue, Puzzle, Size, answer_of, draw_world, true_clues
from ortools.sat.python import cp_model

MOST_BYTES = 200_000
PATIENCE = 300
"""A small size has few puzzles: stop after so many in a row that are there already."""


class Solver:
    """All worlds of a size, as a model of yes-or-no variables."""

    def __init__(self, size: Size, answer: tuple[int, ...]) -> None:
        """`answer`: the one that clues are to leave alone. The model has all worlds with another one."""
        self.size, self.model = size, cp_model.CpModel()
        suspects, rooms, times, weapons = map(range, (size.suspects, size.rooms, max(size.times, 1), size.weapons))
        self.at = {key: self.model.new_bool_var("") for key in itertools.product(suspects, times, rooms)}
        self.lay = {key: self.model.new_bool_var("") for key in itertools.product(weapons, rooms)}
        for s, t in itertools.product(suspects, times):
            self.model.add_exactly_one(self.at[s, t, r] for r in rooms)
        for w in weapons:
            self.model.add_exactly_one(self.lay[w, r] for r in rooms)
        for r in rooms:
            self.model.add_at_most_one(self.lay[w, r] for w in weapons)
        self.questions = self.murder() if size.is_murder else [[self.at[s, 0, r] for r in rooms] for s in suspects]
        literals = [options[index] for options, index in zip(self.questions, answer, strict=True)]
        self.model.add_bool_or([~literal for literal in literals])

    def murder(self) -> list[list[cp_model.IntVar]]:
        """Add who, where, when and with what; return the options of each."""
        size = self.size
        counts = [size.suspects, size.rooms, size.times, *([size.weapons] if size.weapons else [])]
        questions = [[self.model.new_bool_var("") for _ in range(count)] for count in counts]
        for options in questions:
            self.model.add_exactly_one(options)
        who, where, when = questions[:3]
        for (s, t, r), at in self.at.items():
            self.model.add(at == who[s]).only_enforce_if(where[r], when[t])
        for (w, r), lay in self.lay.items():
            self.model.add_implication(questions[3][w], lay).only_enforce_if(where[r])
        return questions

    def add(self, clue: Clue) -> None:
        """Leave only the worlds in which the clue is true."""
        kind, yes, first, *rest = clue
        rooms = range(self.size.rooms)
        if kind in ("with", "stayed"):
            other, time, later = (rest[0], rest[1], rest[1]) if kind == "with" else (first, rest[0], rest[0] + 1)
            for r in rooms:
                here, there = self.at[first, time, r], self.at[other, later, r]
                if yes:
                    self.model.add(here == there)
                else:
                    self.model.add_bool_or([~here, ~there])
            return
        if kind == "empty":
            there = [self.at[s, rest[0], first] for s in range(self.size.suspects)]
            self.model.add(sum(there) == 0 if yes else sum(there) >= 1)
            return
        place = ("who", "where", "when", "what").index(kind) if kind not in ("in", "lay") else None
        if place is not None:
            literal = self.questions[place][first]
        else:
            literal = self.at[first, rest[1], rest[0]] if kind == "in" else self.lay[first, rest[0]]
        self.model.add(literal == yes)


def is_unique(size: Size, clues: list[Clue], answer: tuple[int, ...]) -> bool:
    """Return whether these clues leave no other answer."""
    solver = Solver(size, answer)
    for clue in clues:
        solver.add(clue)
    search = cp_model.CpSolver()
    search.parameters.num_workers = 1
    return bool(search.solve(solver.model) == cp_model.INFEASIBLE)


def make_puzzle(size: Size, rng: random.Random) -> Puzzle:
    """Return a puzzle that has one answer, and no clue that is not needed for that."""
    while True:
        world = draw_world(size, rng)
        answer, clues = answer_of(world), true_clues(size, world)
        rng.shuffle(clues)
        if not is_unique(size, clues, answer):
            continue
        # More clues never leave more answers, so the shortest beginning that is enough can be bisected.
        low, high = 1, len(clues)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_unique(size, clues[:middle], answer) else (middle + 1, high)
        needed = clues[:low]
        for clue in list(needed):
            without = [other for other in needed if other != clue]
            if is_unique(size, without, answer):
                needed = without
        return needed, answer


def make_puzzles(size: Size, count: int, seed: int, first: int = 0) -> list[Puzzle]:
    """Return up to `count` different puzzles; puzzle k is made from `seed` and k alone."""
    puzzles: dict[str, Puzzle] = {}
    misses = 0
    for number in itertools.count(first):
        puzzle = make_puzzle(size, random.Random(f"{size} {seed} {number}"))
        misses = misses + 1 if str(puzzle) in puzzles else 0
        puzzles.setdefault(str(puzzle), puzzle)
        if len(puzzles) == count or misses == PATIENCE:
            break
    return list(puzzles.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make puzzles that have one answer each, with OR-Tools.")
    parser.add_argument("size", type=Size.of, help="suspects x rooms, and x times x weapons: 2x2, 3x3x2, 4x4x3x3")
    parser.add_argument("--puzzles", type=int, default=400, help="how many, if there are so many")
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same puzzles")
    args = parser.parse_args()
    rows = [json.dumps(puzzle, separators=(",", ":")) for puzzle in make_puzzles(args.size, args.puzzles, args.seed)]
    text = "[\n" + ",\n".join(rows) + "\n]\n"
    if len(text) > MOST_BYTES:
        parser.error(f"{len(text):,} bytes are too many for the repository: ask for fewer --puzzles")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{args.size}.json").write_text(text)
    print(f"{len(rows)} puzzles of {args.size}")


if __name__ == "__main__":
    main()
