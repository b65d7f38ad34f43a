"""The mails of the full form: half a year of a company's inbox, written from sentences with gaps.

An inbox states each fact in exactly one mail. A fact that may be wanted has three near misses, mails that share words
with it: one on the same fact that leaves it open, one on another fact of the same project, one on the same kind of fact
of a project with a similar name. Held-out inboxes have other people, projects and suppliers.
"""

import random
from dataclasses import dataclass

from inbox import Case, Mail, Split

FACTS, CHATTER = 20, 20
"""Facts that may be wanted, and mails without any."""
DAYS = 181
"""Days in which the mails came, from FIRST_DAY."""
FIRST_DAY = "2026-01-05"
TURNS, LISTED = 10, 8


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _split(text: str) -> dict[Split, tuple[str, ...]]:
    """Hold out every fourth word."""
    words = _words(text)
    return {"train": tuple(word for k, word in enumerate(words) if k % 4), "eval": words[::4]}


FIRST = _split(
    "Anna Bruno Carla David Elena Felix Grace Hugo Irene Jonas Karin Laura Marco Nina Oscar Paula Quentin Rosa Simon "
    "Tanja Urban Vera Walter Xenia Yusuf Zoe Adele Benno Clara Dario Emil Fiona Georg Helen Ivan Julia Kevin Lena "
    "Martin Nora Olga Peter Rita Sofia Theo Ulla Victor Wanda"
)
LAST = _split(
    "Berg Costa Dorn Evans Fischer Grant Hansen Iversen Jansen Keller Lopez Meyer Novak Olsen Park Quist Reed Silva "
    "Turner Ulrich Vogel Weber Young Ziegler Abel Becker Castro Dahl Engel Frost Gomez Huber Ingram Jonker Kowal Lind"
)
COLOURS = _split(
    "Silver Amber Crimson Golden Hidden Quiet Rapid Bright Little Northern Royal Steady Brave Calm Copper Distant "
    "Early Frozen Gentle Hollow Indigo Jade Lucky Mellow"
)
ANIMALS = _split(
    "Falcon Otter Heron Badger Lynx Raven Bison Cobra Eagle Ferret Gecko Ibis Jackal Kestrel Lemur Marten Newt Osprey "
    "Puffin Quail Robin Swan Tiger Vole Walrus Yak Zebra Beaver Condor Dingo Egret Finch "
    "Gazelle Hare Impala Jay Koala Magpie Oriole Panda"
)
SUPPLIERS = _split(
    "Alvora Brentix Calmeco Dunstra Elverum Fortiva Galbert Hovend Isolde Jorvik Kaspera Lumetra Morvan Nordal Ostrava "
    "Pellini Quartzo Rosvik Sandhof Tarvis Ulstein Vantor Welmar Xantia Yarrow Zellweg"
)
CITIES = _words(
    "Aachen Antwerp Athens Basel Bergen Bern Bilbao Bologna Bordeaux Bremen Bruges Brussels Cologne Copenhagen Cork "
    "Cracow Dresden Dublin Essen Florence Geneva Genoa Ghent Graz Hamburg Hanover Helsinki Innsbruck Leipzig Lille "
    "Linz Lisbon Lyon Madrid Malmo Milan Munich Nantes Naples Oslo Palermo Paris Porto Prague Riga Rome Rotterdam "
    "Salzburg Seville Stockholm Tallinn Trieste Turin Utrecht Valencia Verona Vienna Vilnius Warsaw Zurich"
)
MONTHS = _words("July August September October November December")


@dataclass(frozen=True)
class Topic:
    """A kind of fact: how it is wanted, stated, and left open."""

    kind: str
    """Kind of its value."""
    question: str
    subject: str
    fact: str
    doubt: str


TOPICS = (
    Topic(
        "person",
        "Who is the lead of {project}?",
        "The lead of {project}",
        "The board has decided: {value} is the lead of {project} from now on.",
        "The lead of {project} is still open. {value} was proposed, but nothing is decided.",
    ),
    Topic(
        "date",
        "On which day is the review of {project}?",
        "The review of {project}",
        "All have confirmed, so the review of {project} is on {value}.",
        "Could the review of {project} be on {value}? I wait for answers and will write again.",
    ),
    Topic(
        "city",
        "In which city is the kick-off of {project}?",
        "The kick-off of {project}",
        "The rooms are booked: the kick-off of {project} is in {value}.",
        "For the kick-off of {project} we had hoped for {value}, but the hotel is full. I will look elsewhere.",
    ),
    Topic(
        "amount",
        "How large is the budget of {project}?",
        "The budget of {project}",
        "Finance has approved it: the budget of {project} is {value}.",
        "We asked for a budget of {value} for {project}, which finance refused. A new proposal follows.",
    ),
    Topic(
        "amount",
        "What is the total of the invoice of {supplier} for {project}?",
        "Invoice of {supplier} for {project}",
        "Attached is the invoice of {supplier} for {project}. Its total is {value}.",
        "The invoice of {supplier} for {project} has not come yet. We had expected a total of {value} last year.",
    ),
    Topic(
        "date",
        "By which day does {supplier} deliver for {project}?",
        "Delivery of {supplier} for {project}",
        "{supplier} has signed: they deliver the parts for {project} by {value}.",
        "{supplier} might deliver the parts for {project} by {value}, if their factory opens again. Nothing is sure.",
    ),
    Topic(
        "order",
        "What is the order number of {supplier} for {project}?",
        "Order of {supplier} for {project}",
        "The order number of {supplier} for {project} is {value}. Please put it on every letter.",
        "The old order number {value} of {supplier} for {project} is cancelled. They will send a new one.",
    ),
)

OPENINGS = (
    "I hope you had a good weekend.", "Thanks for your call this morning.", "A short note before I leave.",
    "As we discussed yesterday.", "Sorry for the late answer.", "Good news from my side.",
)  # fmt: skip
CLOSINGS = (
    "Please forward this to your team.", "Call me if anything is unclear.", "More when we meet.",
    "There is no need to answer.", "I have put a copy in the shared folder.", "Let us talk about the rest on Monday.",
)  # fmt: skip
CHATTER_TEXTS = (
    ("Lunch", "The canteen is closed on Thursday. Shall we try the place at the corner?"),
    ("Parking", "Please move your cars from the yard before six, the painters are coming."),
    ("{project} team photo", "The photo of the {project} team hangs in the hall. You blinked."),
    ("Thank you", "The {project} team thanks you for the cake. It did not last for an hour."),
    ("Printer", "The printer on the second floor works again."),
    ("Slides of {project}", "I have moved the slides of {project} to the new folder. Please check the links."),
    ("Newsletter", "We want to write about {project} in the next newsletter. Do you have a picture?"),
    ("Holidays", "I am away for two weeks. In urgent cases write to the front desk."),
)


class _Writer:
    """Draws what an inbox is made of. No value is drawn twice, and no sender is a value."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng, self.split = rng, split
        self.people = [f"{first} {last}" for first in FIRST[split] for last in LAST[split]]
        self.cities = list(CITIES)
        self.dates = [f"{day} {month}" for month in MONTHS for day in range(1, 31)]
        for values in (self.people, self.cities, self.dates):
            rng.shuffle(values)
        self.owner = self.people.pop()
        self.senders = [self.people.pop() for _ in range(12)]
        self.numbers: set[int] = set()
        self.ids = rng.sample(range(1000, 10_000), 4 * FACTS + CHATTER)
        self.mails: list[Mail] = []

    def value(self, kind: str) -> str:
        if kind == "person":
            return self.people.pop()
        if kind == "city":
            return self.cities.pop()
        if kind == "date":
            return self.dates.pop()
        while (number := self.rng.randrange(1000, 99_999)) in self.numbers:
            pass
        self.numbers.add(number)
        return f"{number:,} euros" if kind == "amount" else f"PO-{number}"

    def write(self, day: int, subject: str, text: str) -> Mail:
        sender = self.rng.choice(self.senders)
        parts = [f"Hello {self.owner.split()[0]},", self.rng.choice(OPENINGS), text, self.rng.choice(CLOSINGS)]
        mail = Mail(str(self.ids.pop()), day, sender, subject, "\n".join([*parts, sender.split()[0]]))
        self.mails.append(mail)
        return mail

    def state(self, topic: Topic, day: int, **names: str) -> tuple[Mail, str]:
        """Write the mail that states a fact; return it and the fact's value."""
        value = self.value(topic.kind)
        return self.write(day, topic.subject.format(**names), topic.fact.format(value=value, **names)), value


def draw(split: Split, rng: random.Random) -> Case:
    """Draw an inbox, and a question about one of its facts."""
    writer = _Writer(rng, split)
    projects = [(colour, animal) for colour in COLOURS[split] for animal in ANIMALS[split]]
    rng.shuffle(projects)
    free = dict.fromkeys(projects)
    wanted = rng.randrange(FACTS)
    question, answer, source = "", "", ""
    for number in range(FACTS):
        pairs = ((one, other) for one in free for other in free if one != other)
        project, similar = next(pair for pair in pairs if set(pair[0]) & set(pair[1]))
        del free[project], free[similar]
        supplier = rng.choice(SUPPLIERS[split])
        names = {"project": " ".join(project), "supplier": supplier}
        topic, other = rng.sample(TOPICS, 2)
        open_day, day = sorted(rng.sample(range(DAYS), 2))
        mail, value = writer.state(topic, day, **names)
        doubt = topic.doubt.format(value=writer.value(topic.kind), **names)
        writer.write(open_day, topic.subject.format(**names), doubt)
        writer.state(other, rng.randrange(DAYS), **names)
        writer.state(topic, rng.randrange(DAYS), project=" ".join(similar), supplier=rng.choice(SUPPLIERS[split]))
        if number == wanted:
            question, answer, source = topic.question.format(**names), value, mail.id
    for _ in range(CHATTER):
        subject, text = rng.choice(CHATTER_TEXTS)
        project_name = " ".join(rng.choice(projects))
        writer.write(rng.randrange(DAYS), subject.format(project=project_name), text.format(project=project_name))
    mails = tuple(sorted(writer.mails, key=lambda mail: (mail.day, mail.id)))
    return Case(mails, writer.owner, question, answer, source, TURNS, LISTED)
