"""The conversations that teach the novice the form of examples/autorl: any of four words is repeated.

Never with three colors and one other word, as in the example.
"""

import json
import random
from pathlib import Path

from conversation import Conversation

FOLDER = Path(__file__).resolve().parents[1] / "autorl"
TASK = (FOLDER / "task.txt").read_text().strip()
COLORS, *THINGS = (text.split() for text in json.loads((FOLDER / "words.json").read_text()).values())
WORDS: tuple[str, ...] = (*COLORS, *THINGS[0], *THINGS[1])


def conversation(rng: random.Random) -> Conversation:
    """Return four words; the answer is any of them."""
    colors = rng.choice((0, 1, 2, 4))
    words = rng.sample(COLORS, colors) + rng.sample(WORDS[len(COLORS) :], 4 - colors)
    rng.shuffle(words)
    messages = [
        {"role": "system", "content": TASK},
        {"role": "user", "content": " ".join(words)},
        {"role": "assistant", "content": rng.choice(words)},
    ]
    return Conversation(messages, choices=[words])
