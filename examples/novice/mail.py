"""What the novice learns of the mail example: its commands, used at random, and reading.

It searches for any of the three words that matter in the question (the owner, the kind of fact, the project), reads any
of the mails that are listed, and answers with any value in the mail. The inboxes mix the words of both splits and are
drawn by `rng`: they are neither those of training nor the held-out inboxes.

Other conversations, under a system message of their own, only have something repeated: the subject that has a word, or
the word that follows another one. They teach to see what is written, not which of it matters.
"""

import random
import sys
from pathlib import Path

from conversation import Conversation, Message

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mail"))

import small_mail
from inbox import Inquiry
from small_mail import WORDS

__all__ = ["WORDS", "conversation", "legal"]

VALUES = {value for values in small_mail.KINDS.values() for value in values}
NAMES = {*small_mail.PROJECTS, *small_mail.PEOPLE, *small_mail.KINDS}
READING = 0.4
"""Share of conversations that only have something repeated."""


def conversation(rng: random.Random) -> Conversation:
    """Return a whole attempt, played at random, or something that is repeated."""
    return attempt(rng) if rng.random() >= READING else repeated(rng)


def attempt(rng: random.Random) -> Conversation:
    """Return a whole attempt, played at random."""
    inquiry = Inquiry(small_mail.draw(rng, small_mail.PROJECTS, small_mail.PEOPLE))
    messages = small_mail.messages(inquiry.case)
    while not inquiry.is_over:
        command = rng.choice(legal(inquiry, messages[-1]["content"]))
        messages.append({"role": "assistant", "content": command})
        messages += small_mail.replies(inquiry, command, [])
    return Conversation(messages)


def repeated(rng: random.Random) -> Conversation:
    """Return a few subjects with a word that only one of them has, or a text with a word that another one follows."""
    case = small_mail.draw(rng, small_mail.PROJECTS, small_mail.PEOPLE)
    mails, question = case.mails, small_mail.messages(case)[-1]["content"]
    if rng.random() < 0.5:
        subjects = [mail.subject for mail in rng.sample(mails, small_mail.LISTED)]
        words = [word for subject in subjects for word in subject.split()]
        word = rng.choice([word for word in words if words.count(word) == 1] or words)
        shown, answer = " , ".join(subjects), next(subject for subject in subjects if word in subject.split())
    else:
        shown = rng.choice((rng.choice(mails).body, question))
        words = shown.split()
        place = rng.choice([k for k, word in enumerate(words[:-1]) if words.count(word) == 1])
        word, answer = words[place], words[place + 1]
    turns = [f"{word} : {shown}", f"repeat {answer}"]
    if rng.random() < 0.5:  # the word stands in an earlier message
        turns = [f"{word} ?", "show", shown, turns[1]]
    messages: list[Message] = [{"role": "system", "content": "repeat what has or follows"}]
    messages += [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(turns)]
    return Conversation(messages)


def legal(inquiry: Inquiry, shown: str) -> list[str]:
    """Return the commands that random play may answer the latest message with."""
    text = shown.partition(" : ")[2]
    if inquiry.opened:
        return [f"answer {word}" for word in text.split() if word in VALUES]
    if inquiry.listed:
        return [f"read {subject}" for subject in text.split(" , ")]
    return [f"search {word}" for word in shown.split() if word in NAMES]
