"""The small form: an inbox of eighteen one-line mails, and an agent that searches, reads and answers by short commands.

A mail is known by its subject, a project and a kind of fact. Every word that can be chosen stands behind a space, so
that it is the same token wherever it occurs. Held-out cases have other projects and people; places, days and prices
occur in both, in other combinations.
"""

import random
from typing import Any

from inbox import Case, Inquiry, InvalidCall, Mail, Message, Split


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PROJECTS = _words(
    "Falcon Otter Heron Badger Lynx Raven Bison Cobra Eagle Ferret Gecko Hippo Iguana Jaguar Koala Lemur Moose Newt "
    "Osprey Panda Quail Rabbit Salmon Tiger Urchin Viper Walrus Yak Zebra Beaver Camel Dingo"
)
PEOPLE = _words(
    "Anna Bruno Carla David Elena Felix Grace Hugo Irene Jonas Karin Laura Marco Nina Oscar Paula Quentin Rosa Simon "
    "Tanja Urban Vera Walter Xenia Yusuf Zoe Adele Benno Clara Dario Emil Fiona"
)
KINDS: dict[str, tuple[str, ...]] = {
    "lead": PEOPLE,
    "place": _words(
        "Athens Bern Cairo Dublin Essen Florence Geneva Hanover Lima Lisbon Madrid Oslo Paris Rome Tokyo Vienna"
    ),
    "day": _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "price": _words("ten twenty thirty forty fifty sixty seventy eighty ninety hundred"),
}
"""Kinds of facts, and the values that each may have."""
SYSTEM = "search , read or answer"
_FRAME = _words("search read or answer for the of mails none from was now error")
WORDS = tuple(dict.fromkeys([*PROJECTS, *KINDS, *(value for values in KINDS.values() for value in values), *_FRAME]))
OPTIONS: dict[str, Any] = {"max_tokens": 8}
"""What goes along with each request."""
EVERY = 4
"""Each fourth project and person is held out."""
IN_USE, OF_KINDS = 6, 3
"""Projects of an inbox, and kinds of facts: a mail for each pair."""
LISTED = 3
OF_OWNER = 3
"""Mails that the owner wrote."""
TOOLS = {"search": "search_inbox", "read": "read_email", "answer": "return_final_answer"}


def of_split(words: tuple[str, ...], split: Split) -> tuple[str, ...]:
    return tuple(word for k, word in enumerate(words) if (k % EVERY == 0) == (split == "eval"))


def case(split: Split, rng: random.Random) -> Case:
    return draw(rng, of_split(PROJECTS, split), of_split(PEOPLE, split))


def draw(rng: random.Random, projects: tuple[str, ...], people: tuple[str, ...]) -> Case:
    """Draw an inbox and a question from these words.

    The right answer stands in one mail. Two other mails are about the same project, five about the same kind of fact;
    the owner wrote three of the others, and is nowhere a lead.
    """
    kinds, owner = rng.sample(tuple(KINDS), OF_KINDS), rng.choice(people)
    subjects = [(project, kind) for project in rng.sample(projects, IN_USE) for kind in kinds]
    rng.shuffle(subjects)
    target = rng.randrange(len(subjects))
    others = [one for one in range(len(subjects)) if one != target]
    by_owner = set(rng.sample(others, OF_OWNER))
    values = {kind: [v for v in (people if kind == "lead" else KINDS[kind]) if v != owner] for kind in kinds}
    answer = rng.choice(values[subjects[target][1]])
    mails = []
    for number, (project, kind) in enumerate(subjects):
        was, now = rng.sample([value for value in values[kind] if value != answer], 2)
        now = answer if number == target else now
        order = rng.choice((f"was {was} , now {now} .", f"now {now} , was {was} ."))
        writers = [one for one in people if one not in (owner, was, now)]
        sender = owner if number in by_owner else rng.choice(writers)
        mails.append(Mail(f"{project} {kind}", number, sender, f"{project} {kind}", f"{kind} of {project} {order}"))
    project, kind = subjects[target]
    question = f"the {kind} of {project} ?"
    return Case(tuple(mails), owner, question, answer, mails[target].id, turns=4, listed=LISTED)


def messages(case: Case) -> list[Message]:
    """Return the messages of the first turn."""
    question = f"for {case.owner} : {case.question}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def replies(inquiry: Inquiry, content: str, calls: list[tuple[str, str, str]]) -> list[Message]:
    """Carry out a command; return what the agent is shown, nothing after an answer. There are no tools to call."""
    inquiry.turns += 1
    command, _, rest = content.strip().partition(" ")
    named = {"search": "query", "read": "id", "answer": "answer"}.get(command, "")
    arguments: dict[str, Any] = {named: rest.strip()}
    if command == "answer":
        arguments["sources"] = inquiry.opened[-1:]
    try:
        result = inquiry.use(TOOLS.get(command, command), arguments)
    except InvalidCall:
        return [{"role": "user", "content": "error"}]
    if isinstance(result, Mail):
        return [{"role": "user", "content": f"from {result.sender} : {result.body}"}]
    if isinstance(result, list):
        subjects = " , ".join(mail.subject for mail in result)
        return [{"role": "user", "content": f"mails : {subjects or 'none'}"}]
    return []
