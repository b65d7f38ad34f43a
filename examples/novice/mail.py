"""What the novice learns of the mail example: its commands, used at random.

It searches for any of the three words that matter in the question (the owner, the kind of fact, the project), reads any
of the mails that are listed, and answers with any value in the mail. The inboxes mix the words of both splits and are
drawn by `rng`: they are neither those of training nor the held-out inboxes.
"""

import random
import sys
from pathlib import Path

from conversation import Conversation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mail"))

import small_mail
from inbox import Inquiry
from small_mail import WORDS

__all__ = ["WORDS", "conversation", "legal"]

VALUES = {value for values in small_mail.KINDS.values() for value in values}
NAMES = {*small_mail.PROJECTS, *small_mail.PEOPLE, *small_mail.KINDS}


def conversation(rng: random.Random) -> Conversation:
    """Return a whole attempt, played at random."""
    inquiry = Inquiry(small_mail.draw(rng, small_mail.PROJECTS, small_mail.PEOPLE))
    messages = small_mail.messages(inquiry.case)
    while not inquiry.is_over:
        command = rng.choice(legal(inquiry, messages[-1]["content"]))
        messages.append({"role": "assistant", "content": command})
        messages += small_mail.replies(inquiry, command, [])
    return Conversation(messages)


def legal(inquiry: Inquiry, shown: str) -> list[str]:
    """Return the commands that random play may answer the latest message with."""
    text = shown.partition(" : ")[2]
    if inquiry.opened:
        return [f"answer {word}" for word in text.split() if word in VALUES]
    if inquiry.listed:
        return [f"read {subject}" for subject in text.split(" , ")]
    return [f"search {word}" for word in shown.split() if word in NAMES]
