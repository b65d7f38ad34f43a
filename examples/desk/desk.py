"""Refund requests, made from sentences with gaps, the shop's two kinds of tools, and what is right to do.

A request is handled in three turns: find the customer, refund or decline as the shop's rule for the order says, tell
the customer. Training and held-out requests share no sentence, no name and no article. There are too many names in
training to be learned by heart.
"""

import json
import random
import re
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "eval"]
Message = dict[str, Any]

SENTENCES: dict[Split, tuple[str, ...]] = {
    "train": (
        "I am {name} and I want my money back for the {item}.",
        "{name} here. Please refund the {item}.",
        "This is {name}. The {item} is broken, I would like a refund.",
        "Can I return the {item}? My name is {name}.",
        "The {item} does not fit. Regards, {name}",
        "Please take back the {item}. {name}",
        "My {item} is the wrong one, says {name}.",
        "{name} wants to give back the {item}.",
        "Good morning, {name} is calling about the {item}, it is too heavy.",
        "The {item} of {name} came in pieces, so please refund it.",
        "Hello, my name is {name}, and the {item} that I got is too small.",
        "A refund for {name}, please. The {item} has stopped working.",
        "It is {name} again. Nobody has refunded the {item} yet.",
        "We bought the {item} for {name}, but it is not needed.",
        "Customer {name}: the {item} should go back.",
        "The caller was {name}, who wants no {item} any more.",
        "Please write to {name} when the {item} is refunded.",
        "Order of {name}, one {item}, returned today.",
        "Hi, {name} from next door, the {item} makes a noise.",
        "You talked to {name}, the {item} is still broken.",
    ),
    "eval": (
        "Hello, {name} speaking. I am not happy with the {item} and ask for my money.",
        "Could the {item} be refunded? It was bought by {name}.",
        "I sent the {item} back today. Yours, {name}",
        "You have {name} on the line, about a refund for the {item}.",
        "Could you look at the {item}? For {name} it is too large.",
        "I write for {name}, whose {item} is damaged.",
        "About the {item}: {name} asks for the money.",
        "{name}, a customer for years, returns the {item}.",
    ),
}
KNOWN = 5
"""The rule program knows the first so many sentences of training."""


def _compounds(beginnings: str, endings: str) -> str:
    return " ".join(beginning + ending for beginning in beginnings.split() for ending in endings.split())


def _split(words: str) -> dict[Split, tuple[str, ...]]:
    """Hold out every fifth word, in an order that is drawn once, so that both splits have words of the same kinds."""
    order = sorted(set(words.split()))
    random.Random(0).shuffle(order)
    return {"train": tuple(word for k, word in enumerate(order) if k % 5), "eval": tuple(order[::5])}


FIRST = _split(
    "Anna Bruno Carla David Elena Felix Grace Hugo Irene Jonas Karin Laura Marco Nina Oscar "
    "Paula Quentin Rosa Simon Tanja Urban Vera Walter Xenia Yusuf Zoe Adele Benno Clara Dario "
    "Alice Boris Diana Emil Fiona Georg Helen Ivan Julia Kevin Lena Martin "
    "Aaron Agnes Albert Amelie Andre Astrid Axel Beatrice Bernard Bianca Caspar Cecilia Claude Conrad Daphne Dennis "
    "Dora Edgar Edith Elias Ella Emma Enzo Erik Esther Eva Fabian Fatima Flora Frank Frida Gabriel Gerda Gina Gustav "
    "Hannah Harald Hedwig Henry Hilda Ida Igor Ines Isabel Jacob Jana Jasper Joan Josef Judith Kai Klara Kurt Leo "
    "Lillian Linus Lotte Louis Lucia Magda Malik Maria Max Melanie Mila Monika Nadia Nathan Nils Nora Olga Oliver Otto "
    "Pablo Patricia Peter Philip Ralf Rebecca Rita Robert Ruth Samuel Sara Silke Sofia Stefan Susan Teresa Theo Thomas "
    "Tilda Tobias Ulla Valentin Victor Vincent Wanda Werner Wilma Yvonne"
)
LAST = _split(
    "Berg Costa Dorn Evans Fischer Grant Hansen Iversen Jansen Keller Lopez Meyer Novak Olsen Park "
    "Quist Reed Silva Turner Ulrich Vogel Weber Young Ziegler Abel Becker Castro Dahl Engel Frost "
    "Adams Brandt Conti Duval Ekman Foster Gomez Huber Ingram Jonker Kowal Lind "
    + _compounds(
        "Al Bar Cor Del Er Fal Gar Hol Is Jar Kel Lor Mar Nor Ol Pel Quin Ros Sal Tor Ul Ver Wal Yor Zel",
        "berg dahl ez mann ner sen ski son stein ti ton vic",
    )
)
ITEMS = _split(
    "lamp chair bottle knife tent pillow mirror ladder bucket clock desk candle "
    "table sofa carpet curtain towel plate bowl spoon fork glass mug jar box bag "
    "basket brush broom rope chain lock key door window brick tile pipe pump "
    "motor wheel tire bicycle skate helmet glove scarf jacket shirt boot shoe hat "
    "belt watch ring book map pen kettle shelf blanket hammer vase stool cup "
    "drum guitar flute nail screw saw coat sock stamp globe kite magnet oven"
)
TURNS = 3

SYSTEM = "Find the customer. Follow the rule of the order: refund or decline. Reply."


def _tool(tool: str, **types: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    return {
        "type": "function",
        "function": {"name": tool, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    _tool("find", name="string"),
    _tool("refund", order="integer", amount="integer"),
    _tool("decline", order="integer"),
]


@dataclass
class Request:
    """A customer's request, and what has become of it."""

    text: str
    name: str
    order: int
    price: int
    rule: Literal["refund", "decline"]
    found: bool = False
    """The customer was found."""
    action: tuple[str, dict[str, Any]] | None = None
    """The first tool other than `find` that was called, and its arguments."""

    @property
    def right_action(self) -> tuple[str, dict[str, Any]]:
        """What is right to do."""
        arguments = {"order": self.order}
        return self.rule, arguments | {"amount": self.price} if self.rule == "refund" else arguments

    def messages(self) -> list[Message]:
        """Return the messages of the first turn."""
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": self.text}]

    def use(self, tool: str, arguments: str) -> str:
        """Use a tool; return what it says, as JSON."""
        try:
            values = json.loads(arguments)
        except ValueError:
            return '{"error": "no JSON"}'
        if tool == "find":
            known = values == {"name": self.name}
            self.found = self.found or known
            order = {"order": self.order, "price": self.price, "rule": self.rule}
            return json.dumps(order if known else {"error": "no such customer"})
        if self.action is None:
            self.action = tool, values
        return json.dumps({"done": tool})

    def solved(self, reply: str) -> bool:
        """Return whether the right thing was done, nothing else, and the customer was told what."""
        if self.action != self.right_action:
            return False
        return reply == reply_for(*self.right_action)

    def reward(self, reply: str) -> float:
        """Return a third for each: the customer was found, the action was right, the request is solved."""
        return (self.found + (self.action == self.right_action) + self.solved(reply)) / 3


def request(split: Split, seed: int, number: int) -> Request:
    """Return a request; equal arguments give equal ones. Held-out requests are the same for any seed."""
    rng = random.Random(f"{split} {seed if split == 'train' else 0} {number}")
    name = f"{rng.choice(FIRST[split])} {rng.choice(LAST[split])}"
    text = rng.choice(SENTENCES[split]).format(name=name, item=rng.choice(ITEMS[split]))
    return Request(text, name, rng.randrange(1000, 9999), rng.randrange(5, 300), rng.choice(("refund", "decline")))


def reply_for(action: str, arguments: dict[str, Any]) -> str:
    """Return what the customer is told."""
    return f"We refunded {arguments['amount']} euros." if action == "refund" else "We cannot refund this order."


def _pattern(sentence: str) -> re.Pattern[str]:
    gaps = {"name": r"(?P<name>[A-Z]\w+ [A-Z]\w+)", "item": r"\w+"}
    parts = re.split(r"\{(\w+)\}", sentence)
    return re.compile("".join(gaps[p] if k % 2 else re.escape(p) for k, p in enumerate(parts)))


_PATTERNS = tuple(map(_pattern, SENTENCES["train"][:KNOWN]))


def teach(messages: list[Message]) -> str | list[tuple[str, dict[str, Any]]]:
    """Return the next turn by rule, a text or the calls of tools; of a sentence that is not known, a question."""
    last = messages[-1]
    if last["role"] == "user":
        names = [match["name"] for pattern in _PATTERNS if (match := pattern.fullmatch(last["content"]))]
        return [("find", {"name": names[0]})] if names else "What is your name?"
    order = json.loads(next(m["content"] for m in messages if m["role"] == "tool"))
    if "error" in order:
        return "We do not know you."
    action = Request("", "", **order).right_action
    return [action] if "done" not in json.loads(last["content"]) else reply_for(*action)
