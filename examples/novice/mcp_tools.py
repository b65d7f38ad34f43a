"""The conversations that teach the novice the form of examples/mcp: a call by its name, and a word of its result.

The tools are drawn from twice as many names, and are never exactly those that the example offers, in its order. What is
called has nothing to do with the question, and each word of a result is equally likely as the answer.
"""

import random
import sys
from pathlib import Path

from conversation import Conversation, Message

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mcp"))

import warehouse

PROMPT = "Tools: {tools}. Call one by its name and the item. Then answer in one word."
"""As in scenarios.py, which imports the MCP client."""
OFFERED = ("stock", "price", "shelf", "due")
"""The tools of the example."""
TOOLS = (*OFFERED, "color", "weight", "owner", "maker")
NOUNS = ("stock", "price", "place", "delivery", "color", "weight", "owner", "maker")
VALUES = (*"0123456789", *warehouse.SHELVES, *warehouse.DAYS)
LAST = ("pieces", "euros", *warehouse.ROOMS, *warehouse.TIMES)
WORDS: tuple[str, ...] = tuple(dict.fromkeys((*warehouse.ITEMS, *TOOLS, *NOUNS, *warehouse.DAYS, *LAST)))
ERRORS = 0.03
"""Share of conversations in which the tool has an error."""


def conversation(rng: random.Random) -> Conversation:
    """Return a question, a call of any tool with its item, the result, and any word of that."""
    tools = rng.sample(TOOLS, len(OFFERED))
    if tuple(tools) == OFFERED:
        tools.reverse()
    item = rng.choice(warehouse.ITEMS)
    result = ["error"] if rng.random() < ERRORS else [item, rng.choice(VALUES), rng.choice(LAST)]
    messages: list[Message] = [
        {"role": "system", "content": PROMPT.format(tools=" ".join(tools))},
        {"role": "user", "content": f"What is the {rng.choice(NOUNS)} of {item}?"},
        {"role": "assistant", "content": f"{rng.choice(tools)} {item}"},
        {"role": "user", "content": " ".join(result)},
        {"role": "assistant", "content": rng.choice(result)},
    ]
    return Conversation(messages, choices=[tools, result])
