"""Codenames: the boards, what each role sees, the turns, and what a game is worth to each role.

Two forms:

- small: six words in three pairs, each pair of one category. One pair is ours, one theirs, of the third one word is
  neutral and the other the assassin. The clue is one of three printed words. One turn.
- full: 25 words, 9 of them ours, with free clues and turns until the game is over. After each turn the other team
  covers one of its words, as in the rules for two players.

The words and what they are related to come from WordNet (prepare.py).
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Literal

Kind = Literal["ours", "theirs", "neutral", "assassin"]
Key = dict[str, Kind]
"""What each word of a board is, in the order of the board."""
Draw = Callable[[str], random.Random]
"""The generator of a task for a purpose: equal for all attempts at the task."""

RELATIONS: dict[str, list[str]] = json.loads((Path(__file__).parent / "words.json").read_text())
"""Word -> its category, then its nearest hypernyms."""
GROUPS = {
    "animal": ("dog", "horse", "bird", "cow"),
    "furniture": ("bed", "chair", "desk", "sofa"),
    "vehicle": ("car", "ship", "truck", "boat"),
}
"""Printed clue -> the words of the small form."""
HELD_OUT = 6
"""One set of six words in so many is never trained on."""
HELD_OUT_WORDS = 5
"""The same of the words of the full form, by their order in words.json."""
SHOWN: tuple[Kind, ...] = ("theirs", "neutral", "assassin", "ours")
"""The order in which the spymaster sees the kinds."""

RULES = (
    "Our turn ends with the first word that is not ours. A word of theirs helps the other team, and the assassin loses "
    "the game. After each of our turns the other team covers a word of theirs. We win if all of ours are covered first."
)
GIVE = (
    "You are the spymaster in Codenames. You see which words are ours, theirs, neutral, and the assassin. "
    f"Your operative sees only the words. {RULES} "
    "Give one word that is not on the board, and how many of our words it is for. "
    "The last line of your answer is the clue and the number, and nothing else, such as: ocean 2"
)
PICK = (
    f"You are the operative in Codenames. The spymaster sees which words are ours and gives a clue. {RULES} "
    "Pick at most one word more than the clue's number, the most certain first. "
    "The last line of your answer is these words, with commas between them, and nothing else."
)


@dataclass(frozen=True)
class Form:
    """How many words of each kind a board has, and how it is played."""

    ours: int
    theirs: int
    neutral: int
    turns: int
    clues: tuple[str, ...]
    """The printed clues; none where any word may be a clue."""
    dictionary: float
    """The share of the rewards that WordNet gives instead of the game."""
    max_tokens: int

    def kinds(self) -> list[Kind]:
        """Return the kind of each word."""
        counts: dict[Kind, int] = {"ours": self.ours, "theirs": self.theirs, "neutral": self.neutral, "assassin": 1}
        return [kind for kind, count in counts.items() for _ in range(count)]

    def systems(self) -> tuple[str, str]:
        """Return the system messages of the spymaster and of the operative."""
        if not self.clues:
            return GIVE, PICK
        return spymaster_system(self.clues), "Pick two words for the clue."


def spymaster_system(clues: tuple[str, ...]) -> str:
    return f"Give a clue: {' '.join(clues)}"


FORMS = {
    "small": Form(2, 2, 1, turns=1, clues=tuple(GROUPS), dictionary=0.5, max_tokens=8),
    "full": Form(9, 8, 7, turns=9, clues=(), dictionary=0.0, max_tokens=64),
}


def small_key(split: str, rng: random.Random) -> Key:
    """Return a board of three pairs; the first is ours. No six words are on boards of both splits."""
    pairs = [list(combinations(words, 2)) for words in GROUPS.values()]
    sets = [
        [pair[i] for pair, i in zip(pairs, chosen, strict=True)]
        for chosen in product(*(range(len(each)) for each in pairs))
        if (sum(chosen) % HELD_OUT == 0) == (split == "eval")
    ]
    ours, theirs, others = rng.sample(rng.choice(sets), 3)
    neutral, assassin = rng.sample(others, 2)
    return {**dict.fromkeys(ours, "ours"), **dict.fromkeys(theirs, "theirs"), neutral: "neutral", assassin: "assassin"}


def full_key(form: Form, split: str, rng: random.Random) -> Key:
    """Return a board of words that only this split has."""
    words = [word for k, word in enumerate(RELATIONS) if (k % HELD_OUT_WORDS == 0) == (split == "eval")]
    kinds = form.kinds()
    return dict(zip(rng.sample(words, len(kinds)), kinds, strict=True))


def make_key(form: Form, split: str, rng: random.Random) -> Key:
    """Return what the words of a task's board are, in an order that says nothing."""
    key = small_key(split, rng) if form.clues else full_key(form, split, rng)
    return dict(rng.sample(list(key.items()), len(key)))


def spymaster_text(key: Key) -> str:
    """Return the words that are not covered, by kind. Ours come last, next to the answer."""
    return "\n".join(f"{kind}: {' '.join(word for word in key if key[word] == kind)}" for kind in SHOWN)


def operative_text(words: list[str], clue: str) -> str:
    return f"{' '.join(words)}\nclue: {clue}"


@dataclass(frozen=True)
class Clue:
    word: str
    number: int
    """How many of our words it is for."""


NO_CLUE = Clue("none", 0)


class Game:
    """A game of one attempt."""

    def __init__(self, form: Form, split: str, draw: Draw) -> None:
        self.form, self.draw = form, draw
        self.key = make_key(form, split, draw("board"))
        theirs = [word for word in self.key if self.key[word] == "theirs"]
        self.others = draw("other team").sample(theirs, len(theirs))
        """The order in which the other team covers its words."""
        self.covered: list[str] = []
        self.answers: Counter[str] = Counter()
        self.invalid: Counter[str] = Counter()
        self.by_dictionary = {"spymaster": 0.0, "operative": 0.0}
        """Role -> the sum over its turns of what WordNet says to them."""
        self.news = ""

    @property
    def words(self) -> list[str]:
        """The words that are not covered."""
        return [word for word in self.key if word not in self.covered]

    def _count(self, kind: Kind) -> int:
        return sum(self.key[word] == kind for word in self.covered)

    @property
    def won(self) -> bool:
        return self._count("ours") == self.form.ours

    @property
    def over(self) -> bool:
        lost = self._count("assassin") or self._count("theirs") == self.form.theirs
        return bool(self.won or lost or self.answers["operative"] >= self.form.turns)

    def for_spymaster(self) -> str:
        return self.news + spymaster_text({word: self.key[word] for word in self.words})

    def for_operative(self, clue: Clue) -> str:
        return self.news + operative_text(self.words, clue.word if self.form.clues else f"{clue.word} {clue.number}")

    def clue(self, answer: str) -> Clue:
        """Return the clue of an answer. Instead of an invalid one: a printed one at random, or none at all."""
        self.answers["spymaster"] += 1
        clue = printed_clue(answer, self.form) if self.form.clues else free_clue(answer, self.words)
        if clue is None:
            self.invalid["spymaster"] += 1
            clue = Clue(self.draw("clue").choice(self.form.clues), self.form.ours) if self.form.clues else NO_CLUE
        self.by_dictionary["spymaster"] += reader_margin(self.key, self.words, clue)
        return clue

    def pick(self, clue: Clue, answer: str) -> None:
        """Cover the words of an answer until one is not ours, then let the other team cover one of theirs."""
        self.answers["operative"] += 1
        limit = clue.number if self.form.clues else clue.number + 1
        named = _words_of_last_line(answer)[:limit]
        valid = valid_beginning(named, self.words)
        self.invalid["operative"] += not named or valid != named
        self.by_dictionary["operative"] += fit(valid, clue)
        news = []
        for word in valid:
            self.covered.append(word)
            news.append(f"{word} ({self.key[word]})")
            if self.key[word] != "ours":
                break
        if not self.over:
            other = next(word for word in self.others if word not in self.covered)
            self.covered.append(other)
            self.news = f"Picked: {', '.join(news) or 'nothing'}. The other team covered {other}.\n"

    @property
    def margin(self) -> float:
        """The share of our words that is covered, minus the share of theirs; -1 after the assassin."""
        if self._count("assassin"):
            return -1.0
        return self._count("ours") / self.form.ours - self._count("theirs") / self.form.theirs

    @property
    def share(self) -> float:
        """The share of our words that is covered."""
        return self._count("ours") / self.form.ours

    def rewards(self, dictionary: float) -> dict[str, float]:
        """Return each role's reward: the margin and WordNet's part, towards -1 by the share of invalid answers."""
        rewards = {}
        for role, answers in self.answers.items():
            worth = (1 - dictionary) * self.margin + dictionary * self.by_dictionary[role] / answers
            invalid = self.invalid[role] / answers
            rewards[role] = (1 - invalid) * worth - invalid
        return rewards


def _words_of_last_line(answer: str) -> list[str]:
    lines = answer.strip().lower().splitlines()
    return re.findall("[a-z]+", lines[-1]) if lines else []


def valid_beginning(named: list[str], words: list[str]) -> list[str]:
    """Return the named words up to the first that is not on the board, or is named twice."""
    valid: list[str] = []
    for word in named:
        if word not in words or word in valid:
            break
        valid.append(word)
    return valid


def printed_clue(answer: str, form: Form) -> Clue | None:
    """Return the printed clue that an answer is, or None."""
    word = answer.strip().lower()
    return Clue(word, form.ours) if word in form.clues else None


def free_clue(answer: str, words: list[str]) -> Clue | None:
    """Return the clue in an answer's last line, or None: it is no part of a word on the board, nor has one in it."""
    lines = answer.strip().lower().splitlines()
    match = re.fullmatch(r"\W*([a-z]{2,})\W+([1-9])\W*", lines[-1]) if lines else None
    if match is None or any(match[1] in word or word in match[1] for word in words):
        return None
    return Clue(match[1], int(match[2]))


def is_related(word: str, clue: Clue) -> bool:
    return clue.word in RELATIONS.get(word, ())


def reader_margin(key: Key, words: list[str], clue: Clue) -> float:
    """Return the margin that a reader of WordNet would get from a clue, per word that it is for."""
    margin = 0
    for word in [word for word in words if is_related(word, clue)][: clue.number]:
        if key[word] == "assassin":
            return -1.0
        margin += {"ours": 1, "theirs": -1}.get(key[word], 0)
        if key[word] != "ours":
            break
    return margin / max(1, clue.number)


def fit(named: list[str], clue: Clue) -> float:
    """Return by how much the named words that are related to the clue outnumber the others, from -1 to 1."""
    return sum(1 if is_related(word, clue) else -1 for word in named) / max(1, len(named))
