"""Puzzles of who was where: their clues as sentences, their questions, and how many letters of an answer are right.

A size names how many there are of each: suspects, rooms, and in larger puzzles times and weapons.

- `2x2`, `2x3`, `3x3`: each suspect was in one room. The answer is each suspect's room. Clues are a few words long.
- `3x3x2`, `4x4x3x3`: each suspect was in one room at each time, and one of them is the murderer. The answer is who did
  it, where, when and, where there are weapons, with what.

A puzzle is stored without names, as indexes (`puzzles/`, made by make_puzzles.py). Names are drawn for each task.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval"]
Clue = tuple[str | int, ...]
"""Its kind, 1 or 0 (whether it is affirmed or denied), and an index for each letter of `AXES[kind]`."""
Puzzle = tuple[list[Clue], tuple[int, ...]]
"""Its clues, and its answer: an index for each question."""

FOLDER = Path(__file__).parent / "puzzles"
NAMED = {"small": "2x2", "full": "4x4x3x3"}
"""Sizes for a tiny model, and for one from 3B on."""
HELD_OUT = 4
"""Every fourth stored puzzle is held out; in the small form every fourth of those that differ by more than letters."""
AXES = {
    "in": "srt", "with": "sst", "stayed": "st", "empty": "rt", "lay": "wr",
    "who": "s", "where": "r", "when": "t", "what": "w",
}  # fmt: skip
"""What a clue of each kind is about: s suspects, r rooms, t times, w weapons."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: dict[Split, tuple[str, ...]] = {
    "train": _words(
        "Adele Anna Benno Bruno Carla Clara Dario David Elena Emil Felix Fiona Grace Hugo Irene Jonas Karin Laura "
        "Marco Nina"
    ),
    "eval": _words("Oscar Paula Quentin Rosa Simon Tanja Urban Vera Walter Xenia Yusuf Zoe"),
}
ROOMS = _words("attic bakery cellar den garage hall kitchen library pantry studio")
TIMES = _words("seven eight nine ten eleven")
WEAPONS = _words("axe bottle candle dagger hammer knife poison rope")
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Size:
    """How many there are of each; no times and no weapons in the small form."""

    suspects: int
    rooms: int
    times: int = 0
    weapons: int = 0

    @classmethod
    def of(cls, text: str) -> "Size":
        """Return the size that a text names: `4x4x3x3`, or one of NAMED."""
        size = cls(*map(int, NAMED.get(text, text).split("x")))
        most = (len(NAMES["eval"]), len(ROOMS), len(TIMES), min(len(WEAPONS), size.rooms))
        if not all(0 <= number <= limit for number, limit in zip(size.numbers, most, strict=True)):
            raise ValueError(f"{text}: at most {'x'.join(map(str, most))}, and no more weapons than rooms")
        if min(size.suspects, size.rooms) < 2 or (size.weapons and not size.times):
            raise ValueError(f"{text}: two suspects and two rooms at the least, and weapons only with times")
        return size

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.suspects, self.rooms, self.times, self.weapons)

    @property
    def is_murder(self) -> bool:
        return self.times > 0

    def __str__(self) -> str:
        return "x".join(str(number) for number in self.numbers if number)


@dataclass(frozen=True)
class World:
    """What really happened."""

    rooms_ST: tuple[tuple[int, ...], ...]
    """The room of each suspect at each time; one time in the small form."""
    lay_W: tuple[int, ...] = ()
    """The room in which each weapon lay."""
    murder: tuple[int, ...] = ()
    """Who, where, when and, where there are weapons, with what."""


def draw_world(size: Size, rng: random.Random) -> World:
    """Return a world: the murderer was alone in the room then, and the weapon lay in that room."""
    while True:
        rooms_ST = tuple(
            tuple(rng.randrange(size.rooms) for _ in range(max(size.times, 1))) for _ in range(size.suspects)
        )
        lay_W = tuple(rng.sample(range(size.rooms), size.weapons))
        if not size.is_murder:
            return World(rooms_ST)
        who, when = rng.randrange(size.suspects), rng.randrange(size.times)
        where = rooms_ST[who][when]
        is_alone = [rooms[when] for rooms in rooms_ST].count(where) == 1
        if is_alone and (not size.weapons or where in lay_W):
            what = (lay_W.index(where),) if size.weapons else ()
            return World(rooms_ST, lay_W, (who, where, when, *what))


def answer_of(world: World) -> tuple[int, ...]:
    """Return an index for each question."""
    return world.murder or tuple(rooms_T[0] for rooms_T in world.rooms_ST)


def is_so(kind: str, places: tuple[int, ...], world: World) -> bool:
    """Return whether what a clue is about happened."""
    first, *rest = places
    rooms_ST = world.rooms_ST
    happened: dict[str, Callable[[], bool]] = {
        "in": lambda: rooms_ST[first][rest[1]] == rest[0],
        "with": lambda: rooms_ST[first][rest[1]] == rooms_ST[rest[0]][rest[1]],
        "stayed": lambda: rooms_ST[first][rest[0]] == rooms_ST[first][rest[0] + 1],
        "empty": lambda: first not in [rooms_T[rest[0]] for rooms_T in rooms_ST],
        "lay": lambda: world.lay_W[first] == rest[0],
        "who": lambda: world.murder[0] == first,
        "where": lambda: world.murder[1] == first,
        "when": lambda: world.murder[2] == first,
        "what": lambda: world.murder[3] == first,
    }
    return happened[kind]()


def true_clues(size: Size, world: World) -> list[Clue]:
    """Return all clues that are true. None of them affirms an answer of a murder."""
    suspects, rooms, times, weapons = map(range, (size.suspects, size.rooms, max(size.times, 1), size.weapons))
    about: list[tuple[str, tuple[int, ...]]] = [("in", (s, r, t)) for s in suspects for r in rooms for t in times]
    about += [("with", (s, other, t)) for s in suspects for other in range(s) for t in times]
    if size.is_murder:
        about += [("stayed", (s, t)) for s in suspects for t in times[:-1]]
        about += [("empty", (r, t)) for r in rooms for t in times]
        about += [("lay", (w, r)) for w in weapons for r in rooms]
        about += [("who", (s,)) for s in suspects] + [("where", (r,)) for r in rooms]
        about += [("when", (t,)) for t in times] + [("what", (w,)) for w in weapons]
    clues: list[Clue] = [(kind, int(is_so(kind, places, world)), *places) for kind, places in about]
    return [clue for clue in clues if not (clue[1] and clue[0] in ("who", "where", "when", "what"))]


@dataclass(frozen=True)
class Task:
    """A puzzle with its names."""

    size: Size
    clues: list[str]
    questions: tuple[str, ...]
    letters: tuple[str, ...]
    """The right answer to each question."""
    options: dict[str, tuple[str, ...]]
    """Of a murder: what the letters stand for, by question."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation to be answered."""
        if not self.size.is_murder:
            rooms = " ".join(LETTERS[: self.size.rooms])
            names = " ".join(f"{name}?" for name in self.questions)
            system = f"Say in which room each was: {rooms}. Answer like a clue."
            return [_message("system", system), _message("user", f"{' '.join(self.clues)}\n{names}")]
        lists = [
            f"{question}: {', '.join(f'{letter} {word}' for letter, word in zip(LETTERS, words, strict=False))}"
            for question, words in self.options.items()
        ]
        form = ["", "End with:", *(f"{question}: <letter>" for question in self.questions)]
        system = _MURDER + (_WEAPONS if self.size.weapons else "") + _FIND
        return [_message("system", system), _message("user", "\n".join([*lists, "", *self.clues, *form]))]

    def share(self, answer: str) -> float:
        """Return the share of the letters that are right; of several answers to a question the last one counts."""
        link = r"\s*:\s*" if self.size.is_murder else r" in "
        given = [re.findall(rf"\b{question}{link}([A-Z])\b", answer) for question in self.questions]
        right = [letters[-1:] == [letter] for letters, letter in zip(given, self.letters, strict=True)]
        return sum(right) / len(right)


_MURDER = (
    "The victim died in one room at one time, and did not move before. Of the suspects only the murderer was in that "
    "room then. At each time each suspect was in one of the rooms. "
)
_WEAPONS = (
    "Each weapon lay in one room throughout, no two in the same room, and the one that was used lay where the victim "
    "died. "
)
_FIND = "Find out the letters from the clues."


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sentence(clue: Clue, names: dict[str, tuple[str, ...]], is_murder: bool) -> str:
    """Return a clue in words; `names`: by axis."""
    kind, yes, *indexes = clue
    words = [names[axis][int(index)] for axis, index in zip(AXES[str(kind)], indexes, strict=True)]
    no = "" if yes else "not "
    if not is_murder:
        return f"{words[0]} {no}{kind} {words[1]}."
    later = names["t"][int(indexes[-1]) + 1] if kind == "stayed" else ""
    return {
        "in": lambda: f"At {words[2]}, {words[0]} was {no}in the {words[1]}.",
        "with": lambda: f"At {words[2]}, {words[0]} was {no}in the same room as {words[1]}.",
        "stayed": lambda: f"{words[0]} was {no}in the same room at {words[1]} and at {later}.",
        "empty": lambda: f"At {words[1]}, {'none' if yes else 'at least one'} of the suspects was in the {words[0]}.",
        "lay": lambda: f"The {words[0]} {'lay' if yes else 'did not lie'} in the {words[1]}.",
        "who": lambda: f"{words[0]} is not the murderer.",
        "where": lambda: f"The murder did not happen in the {words[0]}.",
        "when": lambda: f"The murder did not happen at {words[0]}.",
        "what": lambda: f"The {words[0]} was not used.",
    }[str(kind)]()


def name_puzzle(puzzle: Puzzle, size: Size, split: Split, rng: random.Random) -> Task:
    """Give a puzzle names. A murder's rooms and weapons have names too, and letters in the order of the alphabet.

    Else a room's letter is drawn: no letter is right more often than another.
    """
    clues, answer = puzzle
    rooms = ROOMS if size.is_murder else LETTERS[: size.rooms]
    names = {"s": tuple(rng.sample(NAMES[split], size.suspects)), "r": tuple(rng.sample(rooms, size.rooms)), "t": TIMES}
    if size.is_murder:
        names |= {"w": tuple(rng.sample(WEAPONS, size.weapons))}
    sentences = [sentence(clue, names, size.is_murder) for clue in clues]
    if not size.is_murder:
        return Task(size, sentences, names["s"], tuple(names["r"][room] for room in answer), {})
    by_question = {"Who": "s", "Where": "r", "When": "t", "What": "w"}
    questions = tuple(by_question)[: len(answer)]
    right = [names[by_question[question]][index] for question, index in zip(questions, answer, strict=True)]
    options = {question: tuple(sorted(names[axis])) for question, axis in by_question.items() if question in questions}
    options |= {"When": TIMES[: size.times]}
    letters = tuple(LETTERS[words.index(word)] for words, word in zip(options.values(), right, strict=True))
    return Task(size, sentences, questions, letters, options)


@cache
def stored(size: Size) -> list[Puzzle]:
    """Return the puzzles of a size that is prepared; none of any other."""
    file = FOLDER / f"{size}.json"
    rows = json.loads(file.read_text()) if file.is_file() else []
    return [([tuple(clue) for clue in clues], tuple(answer)) for clues, answer in rows]


@cache
def of_split(size: Size, split: Split) -> list[Puzzle]:
    """Return the stored puzzles of a split. Those that differ only in what the rooms are called are in the same one."""
    puzzles = stored(size)
    if size.is_murder:
        return [puzzle for number, puzzle in enumerate(puzzles) if (number % HELD_OUT == 0) == (split == "eval")]
    kinds = [without_letters(clues, size.rooms) for clues, _ in puzzles]
    held_out = set(sorted(dict.fromkeys(kinds), key=lambda kind: weight([*kind]))[::HELD_OUT])
    return [puzzle for puzzle, kind in zip(puzzles, kinds, strict=True) if (kind in held_out) == (split == "eval")]


def without_letters(clues: list[Clue], rooms: int) -> tuple[Clue, ...]:
    """Return clues that are the same for all puzzles that differ only in what the rooms are called."""

    def renamed(clue: Clue, order: tuple[int, ...]) -> Clue:
        kind, yes, *indexes = clue
        axes = AXES[str(kind)]
        named = [order[int(k)] if axis == "r" else k for axis, k in zip(axes, indexes, strict=True)]
        return (kind, yes, *named)

    return min(tuple(sorted(renamed(clue, order) for clue in clues)) for order in permutations(range(rooms)))


def weight(clues: list[Clue]) -> int:
    """Return how often a small puzzle comes: the more affirmed clues, which are easier to read, the more often."""
    return 1 + 2 * sum(int(clue[1]) for clue in clues)


def task(size: Size, split: Split, rng: random.Random) -> Task:
    """Return a puzzle. Held-out puzzles have other clues and other names than those in training."""
    if puzzles := of_split(size, split):
        puzzle = rng.choices(puzzles, [1 if size.is_murder else weight(clues) for clues, _ in puzzles])[0]
    else:
        from make_puzzles import make_puzzle  # it needs OR-Tools

        puzzle = make_puzzle(size, rng)
    return name_puzzle(puzzle, size, split, rng)
