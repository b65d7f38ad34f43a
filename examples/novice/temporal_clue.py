"""The conversations that teach the novice the form of examples/temporal_clue: rooms named at random, and reading.

Random play names any room that is written in the system message or in a clue, about any suspect. A model that draws a
letter and looks nowhere does not learn by rewards to look (docs/log/learning.md).

No puzzle of the example is among them: each has a suspect of both splits. Clues are drawn whatever follows from them;
they may contradict each other.
"""

import random
import sys
from pathlib import Path

from conversation import Conversation, Message

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "temporal_clue"))

import clues

NAMES = (*clues.NAMES["train"], *clues.NAMES["eval"])
WORDS: tuple[str, ...] = (*NAMES, "in", "not", "with")
READING = 0.3
"""Share of conversations that only have a clue repeated: they teach to see what is written of whom."""


def conversation(rng: random.Random) -> Conversation:
    """Return a puzzle with an answer that is uniformly random, or a clue that is repeated."""
    suspects, rooms = rng.choice(((2, 2), (2, 2), (2, 3), (3, 3)))
    names = [rng.choice(clues.NAMES["train"]), rng.choice(clues.NAMES["eval"])]
    names += rng.sample([name for name in NAMES if name not in names], suspects - 2)
    rng.shuffle(names)
    letters = clues.LETTERS[:rooms]
    if rng.random() < READING:
        return repeated(names, letters, rng)
    sentences = [sentence(name, names, letters, rng) for name in names]
    if rooms > 2:
        sentences += [sentence(rng.choice(names), names, letters, rng) for _ in range(rng.randrange(3))]
    rng.shuffle(sentences)
    task = clues.Task(clues.Size(suspects, rooms), sentences, tuple(names), (), {})
    written = letters + "".join(letter for letter in letters for text in sentences if text.endswith(f" {letter}."))
    answer = " ".join(f"{name} in {rng.choice(written)}." for name in names)
    return Conversation([*task.messages, {"role": "assistant", "content": answer}])


def sentence(name: str, names: list[str], letters: str, rng: random.Random) -> str:
    """Return a clue about this suspect."""
    no = rng.choice(("", "not "))
    if rng.random() < 0.3:
        return f"{name} {no}with {rng.choice([other for other in names if other != name])}."
    return f"{name} {no}in {rng.choice(letters)}."


def repeated(names: list[str], letters: str, rng: random.Random) -> Conversation:
    """Return a clue for each suspect, and one of them repeated."""
    sentences = {name: sentence(name, names, letters, rng) for name in rng.sample(names, len(names))}
    name = rng.choice(names)
    messages: list[Message] = [
        {"role": "system", "content": "Repeat the clue."},
        {"role": "user", "content": f"{' '.join(sentences.values())}\n{name}?"},
        {"role": "assistant", "content": sentences[name]},
    ]
    return Conversation(messages)
