"""What the formats of the novice draw: conversations, as those of the starter."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "starter"))

from formats import Conversation, Message

__all__ = ["Conversation", "Message"]
