"""Order messages, made from sentences with gaps, and the facts that each holds.

Training and held-out messages share no sentence, no name, no town, no article and no remark: a right record of a
held-out message shows that the model has learned to find the facts, not which words they are. Most words are made of
two parts, so that there are too many of them to be learned by heart; held-out ones are drawn from the same lists.
"""

import json
import random
import re
from typing import Any, Literal

Split = Literal["train", "eval"]
Facts = dict[str, str | int]

SENTENCES: dict[Split, tuple[str, ...]] = {
    "train": (
        "{name} from {town} orders {count} {item}.",
        "Please send {count} {item} to {name} in {town}.",
        "New order: {count} {item} for {name}, {town}.",
        "{name} would like {count} {item}. Deliver to {town}.",
        "Ship {count} {item} to {town}, care of {name}.",
        "In {town}, {name} is waiting for {count} {item}.",
        "We sold {count} {item} to {name}, who lives in {town}.",
        "{count} {item} go to {town}. The customer is {name}.",
        "Customer {name}, {town}: {count} {item}.",
        "{town} office: {name} asks for {count} {item}.",
        "Could you reserve {count} {item} for {name} of {town}?",
        "{name} wrote from {town} and needs {count} {item}.",
        "{town}, today. We are out of {item} and need {count} more. {name}",
        "Hello, {name} speaking, from {town}. I take {count} {item}.",
        "Yesterday {name} picked {count} {item} for the house in {town}.",
        "Put {count} {item} on the van to {town} for {name}.",
        "{name} paid for {count} {item}, to be brought to {town}.",
        "Reminder: {town} still lacks {count} {item}; ask {name}.",
        "Note from {name}: {count} {item}, my new address is in {town}.",
        "As agreed with {name}, {count} {item} travel to {town}.",
    ),
    "eval": (
        "{name} rang from {town} about buying {count} {item}.",
        "Take {count} {item} off the shelf for {name}; the address is in {town}.",
        "For {town}: {count} {item}, to be signed for by {name}.",
        "A parcel of {count} {item} is for {name}, a regular in {town}.",
        "Our client {name} has moved to {town} and wants {count} {item} there.",
        "{count} {item}, please. Yours, {name}, {town}.",
        "The shop in {town} lets {name} have {count} {item}.",
        "Write down for {name}: {count} {item}, to be left in {town}.",
    ),
}
KNOWN = 10
"""The rule program knows the first so many sentences of training."""
REMARKS: dict[Split, tuple[str, ...]] = {
    "train": (
        "{other} took the call.",
        "The warehouse in {place} has them.",
        "It was {other} who forwarded this.",
        "They leave from {place} on day {day}.",
        "Invoice {day} goes to {other}.",
    ),
    "eval": (
        "Ask {other} if anything is unclear.",
        "Room {day} in {place} keeps the stock.",
        "{other} paid on day {day}.",
    ),
}
"""Follow two messages in three, with a person, a town or a number that does not belong to the record."""


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
    "Alice Boris Diana Emil Fiona Georg Helen Ivan Julia Kevin Lena Martin"
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
TOWNS = _split(
    "Oslo Porto Lyon Turin Bergen Gdansk Leeds Malmo Ghent Basel Cork Graz Split Varna Tartu "
    "Vienna Prague Madrid Lisbon Athens Dublin Munich Geneva Naples Venice Zagreb Warsaw "
    "Helsinki Brussels Hamburg Krakow Bristol Antwerp Utrecht Toulouse Cologne Florence "
    "Bonn Nantes Parma Aarhus Derby Riga Seville Linz Paris London Berlin Milan Rome Bruges "
    + _compounds(
        "Alder Birch Cold Dun East Fair Green High Iron Kings Lang Mill North Oak Port Red Stone Wester",
        "bridge burg bury dale field ford ham haven mouth stad ton ville wick",
    )
)
_THINGS = (
    "lamps chairs bottles knives tents pillows mirrors ladders buckets clocks desks candles "
    "tables sofas carpets curtains towels plates bowls spoons forks glasses mugs jars boxes bags "
    "baskets brushes brooms ropes chains locks keys doors windows bricks tiles pipes pumps "
    "motors wheels tires bicycles skates helmets gloves scarves jackets shirts boots shoes hats "
    "belts watches rings books maps pens kettles shelves blankets hammers vases stools cups "
    "drums guitars flutes nails screws saws coats socks stamps globes kites magnets ovens"
)
ITEMS = _split(
    _THINGS
    + " "
    + _compounds(
        "arm bath bed camp farm field garden hand head house lunch night rain river school sea snow tea toy wall wind",
        _THINGS,
    )
)
COUNTS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
"""The count 2 and so on, in words. Half of the messages have a word, the others a number."""

SYSTEM = 'Write the order as JSON: {"name": ..., "town": ..., "item": ..., "count": number}'


def messages(text: str) -> list[dict[str, str]]:
    """Return the request's messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def record(split: Split, seed: int, number: int) -> tuple[str, Facts]:
    """Return a message and its facts; equal arguments give equal ones. Held-out messages are the same for any seed."""
    rng = random.Random(f"{split} {seed if split == 'train' else 0} {number}")
    count = rng.randrange(2, len(COUNTS) + 2)
    names, (town, place) = rng.sample(FIRST[split], 2), rng.sample(TOWNS[split], 2)
    name, other = (f"{first} {rng.choice(LAST[split])}" for first in names)
    facts: Facts = {"name": name, "town": town, "item": rng.choice(ITEMS[split]), "count": count}
    shown = facts | {"count": rng.choice((str(count), COUNTS[count - 2]))}
    text = rng.choice(SENTENCES[split]).format(**shown)
    if rng.random() < 2 / 3:
        text += " " + rng.choice(REMARKS[split]).format(other=other, place=place, day=rng.randrange(2, 30))
    return text[0].upper() + text[1:], facts


def score(answer: str, facts: Facts) -> tuple[int, float]:
    """Return whether an answer is the record, and the share of its fields that are right; 0 where it is no record."""
    try:
        found: Any = json.loads(answer)
    except ValueError:
        return 0, 0.0
    if not isinstance(found, dict) or found.keys() - facts.keys():
        return 0, 0.0
    right = sum(
        name in found and found[name] == fact and type(found[name]) is type(fact) for name, fact in facts.items()
    )
    return int(right == len(facts)), right / len(facts)


_GAPS = {"name": r"[A-Z]\w+ [A-Z]\w+", "town": r"[A-Z]\w+", "item": r"\w+", "count": r"\d+"}


def _pattern(sentence: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", sentence)
    return re.compile("".join(f"(?P<{p}>{_GAPS[p]})" if k % 2 else re.escape(p) for k, p in enumerate(parts)))


_PATTERNS = tuple(map(_pattern, SENTENCES["train"][:KNOWN]))


def teach(text: str) -> str:
    """Return the record of a plain message, a known sentence with a number and no remark; of any other `{}`."""
    for pattern in _PATTERNS:
        if match := pattern.fullmatch(text):
            return json.dumps({name: match[name] for name in ("name", "town", "item")} | {"count": int(match["count"])})
    return "{}"
