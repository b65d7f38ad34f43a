"""What the warehouse of server.py has: articles, where they are, when more of them comes. Equal in each run."""

import random
from dataclasses import dataclass
from datetime import date, timedelta

_ITEMS = (
    "lamp chair bottle knife tent pillow mirror ladder bucket clock desk candle table sofa carpet towel plate bowl "
    "spoon fork glass mug jar box bag basket brush broom rope chain lock key door window brick tile pipe pump motor "
    "wheel tire helmet glove scarf jacket shirt boot shoe hat belt watch ring book map pen kettle blanket hammer "
    "vase stool cup drum flute nail screw saw coat sock stamp globe kite magnet oven fan bell ball doll flag frame "
    "crate barrel anchor apron axe bench bike bolt bulb cable camera card cart comb couch crown dice drill easel "
    "file funnel gate harp hook horn iron jug lens lid mask mat net paddle paint pan pedal pin plug pot purse quilt "
    "rake ruler "
)
ITEMS = tuple(_ITEMS.split())
"""Every second one is held out."""
SHELVES = "ABCDEFGH"
ROOMS = ("cellar", "hall", "attic")
TIMES = ("morning", "noon", "evening")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TODAY = date(2026, 1, 5)
"""What the server takes for today, so that each run has the same answers."""


@dataclass(frozen=True)
class Article:
    """One kind of thing."""

    item: str
    stock: int
    price: int
    """Euros."""
    shelf: str
    room: str
    due: date
    """When more comes."""
    time: str


def articles() -> list[Article]:
    """Return all articles."""
    rng = random.Random("warehouse")
    return [
        Article(
            item,
            stock=rng.randrange(10),
            price=rng.randrange(1, 10),
            shelf=rng.choice(SHELVES),
            room=rng.choice(ROOMS),
            due=TODAY + timedelta(days=rng.randrange(1, 21)),
            time=rng.choice(TIMES),
        )
        for item in ITEMS
    ]


def plan(room: str) -> str:
    """Return the text of a room's plan: a line for each article, with its shelf."""
    return "".join(f"{article.item} {article.shelf}\n" for article in articles() if article.room == room)
