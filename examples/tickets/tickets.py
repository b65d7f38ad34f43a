"""Support tickets, made from sentences with gaps, and the team that each belongs to.

Every team has sentences for training and others that are held out: an answer to those shows that the model has learned
what a team does, not which sentence belongs to it.
"""

import random
from typing import Literal

Split = Literal["train", "eval"]

SENTENCES: dict[str, dict[Split, tuple[str, ...]]] = {
    "billing": {
        "train": (
            "I was charged {amount} twice for {item}.",
            "My invoice {number} shows the wrong address.",
            "Please refund the {amount} for {item}.",
            "Why did my plan go up to {amount} a month?",
            "The receipt for {item} has not arrived by mail.",
            "My card was declined when I paid {amount}.",
            "Can I pay invoice {number} by bank transfer?",
            "There is a fee of {amount} that I do not know.",
            "Please take VAT off invoice {number}.",
            "The discount was not taken off {item}.",
        ),
        "eval": (
            "You took {amount} from my account and I never agreed.",
            "I need a copy of bill {number} for my accountant.",
            "The price of {item} on the statement is too high.",
            "When do I get my money back for {item}?",
        ),
    },
    "shipping": {
        "train": (
            "Where is the parcel with {item}?",
            "{item} arrived at the wrong house.",
            "The courier left {item} in the rain.",
            "Order {number} has been in transit for {days} days.",
            "Can you deliver {item} on a Saturday?",
            "The tracking page of order {number} is empty.",
            "Please send {item} to my office instead.",
            "The box with {item} was open when it came.",
            "How long does delivery of {item} take?",
            "My package was returned to you after {days} days.",
        ),
        "eval": (
            "I have waited {days} days and {item} is still not here.",
            "The driver could not find my door with order {number}.",
            "Half of order {number} is missing from the carton.",
            "Can {item} be sent abroad by express mail?",
        ),
    },
    "technical": {
        "train": (
            "The app crashes when I open {page}.",
            "I cannot log in since {days} days.",
            "{page} shows error {number}.",
            "The password reset link does not work.",
            "Your API answers with status {number}.",
            "The screen stays white after the update.",
            "{page} is very slow on my phone.",
            "How do I export my data from {page}?",
            "The upload stops at {days} percent.",
            "Two-factor codes are not accepted on {page}.",
        ),
        "eval": (
            "Nothing happens when I press save on {page}.",
            "I get a timeout with code {number} in the browser.",
            "After the new version {page} is blank.",
            "My account is locked out of {page}.",
        ),
    },
}
"""Team -> split -> sentences."""
ITEMS = (
    "the blue jacket", "the desk lamp", "a pair of boots", "the headphones", "my coffee grinder", "the kitchen knife",
    "two chairs", "the bike helmet", "the winter coat", "a phone case", "the garden table", "the red suitcase",
)  # fmt: skip
PAGES = ("the dashboard", "my profile", "the settings page", "the search page", "the calendar", "the reports tab")

EXAMPLES = (
    ("You sent invoice 4410 to my old company.", "billing"),
    ("The postman says that order 7731 is lost.", "shipping"),
    ("The website does not load on my laptop.", "technical"),
)
SYSTEM = "Route each ticket to one team: billing, shipping or technical. Answer with the team's name alone."


def messages(ticket: str) -> list[dict[str, str]]:
    """Return the request's messages: the instruction, three answered tickets, and the ticket."""
    shown = [
        {"role": role, "content": text}
        for question, team in EXAMPLES
        for role, text in (("user", question), ("assistant", team))
    ]
    return [{"role": "system", "content": SYSTEM}, *shown, {"role": "user", "content": ticket}]


def ticket(split: Split, seed: int, number: int) -> tuple[str, str]:
    """Return a ticket and its team; equal arguments give equal ones. Held-out tickets are the same for any seed."""
    rng = random.Random(f"{split} {seed if split == 'train' else 0} {number}")
    team = sorted(SENTENCES)[number % len(SENTENCES)]
    gaps = {
        "amount": f"{rng.randrange(5, 300)} euros",
        "number": str(rng.randrange(1000, 9999)),
        "days": str(rng.randrange(2, 60)),
        "item": rng.choice(ITEMS),
        "page": rng.choice(PAGES),
    }
    text = rng.choice(SENTENCES[team][split]).format(**gaps)
    return text[0].upper() + text[1:], team


def is_right(answer: str, team: str) -> bool:
    """Return whether an answer names the team and nothing else; a full stop and capitals do not matter."""
    return answer.strip().rstrip(".").lower() == team


def comment(team: str, *, is_right: bool) -> str:
    """Return what the reader of an answer writes about it: which team was right."""
    return f"Yes, {team} is right." if is_right else f"It should have gone to {team}."
