"""Turns of the small Codenames, in either role, with answers that are uniform over the legal ones.

Which words are ours is drawn without regard to their categories, so nothing here says what a clue means.
"""

import random
import sys
from pathlib import Path

from conversation import Conversation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codenames"))

import cards

FORM = cards.FORMS["small"]
PLAYED = tuple(word for words in cards.GROUPS.values() for word in words)
"""The words of the game."""
OTHERS = (
    *("rat", "fish", "pig", "snake", "eye", "hand", "nose", "knee", "house", "barn", "palace", "hotel"),
    *("coat", "shirt", "hat", "sock", "milk", "bread", "coffee", "tea", "tree", "rose", "grass", "vine"),
    *("pen", "axe", "pan", "shovel", "river", "lake", "sea", "bay", "gun", "sword", "rifle", "wind"),
)
CLUES = ("body", "building", "clothing", "food", "plant", "tool", "water", "weapon", "weather")
"""Printed beside the game's own three."""
WORDS: tuple[str, ...] = (
    *("Give", "a", "clue", "Pick", "two", "words", "for", "the", *cards.SHOWN),
    *(*PLAYED, *OTHERS, *FORM.clues, *CLUES),
)


def random_key(rng: random.Random) -> cards.Key:
    """Return a board of any six words but those of the game's boards: two of each of its categories."""
    kinds = FORM.kinds()
    while True:
        words = rng.sample(PLAYED if rng.random() < 0.5 else PLAYED + OTHERS, len(kinds))
        if any(len(set(words) & set(group)) != 2 for group in cards.GROUPS.values()):
            return dict(zip(words, rng.sample(kinds, len(kinds)), strict=True))


def conversation(rng: random.Random) -> Conversation:
    """Return a clue, or the two words that are picked for one."""
    key = random_key(rng)
    clues = FORM.clues if rng.random() < 0.5 else tuple(rng.sample(FORM.clues + CLUES, len(FORM.clues)))
    system, user, answer, choices = rng.choice((spymaster, operative))(rng, key, clues)
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
    ]
    return Conversation(messages, choices=[choices])


Turn = tuple[str, str, str, list[str]]
"""The system message, what the role sees, an answer, and what its first token may be."""


def spymaster(rng: random.Random, key: cards.Key, clues: tuple[str, ...]) -> Turn:
    return cards.spymaster_system(clues), cards.spymaster_text(key), rng.choice(clues), list(clues)


def operative(rng: random.Random, key: cards.Key, clues: tuple[str, ...]) -> Turn:
    words = list(key)
    answer = " ".join(rng.sample(words, FORM.ours))
    return FORM.systems()[1], cards.operative_text(words, rng.choice(clues)), answer, words
