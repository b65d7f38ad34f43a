"""Select and read from SQL the words that followed an answer in its trajectory: a tool's error, the user's reply.

They are in the messages of the turn that goes on from the answer. A turn that asks the same again, or an edited
question, goes on from an earlier answer or from none. Reads only.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.followups import after_answer, tool_error, user_reply
from trainer.domain.examples.sft_examples import ExampleSelection
from trainer.store.examples.sources import Source, own_answers
from whetstone.config.trainer import REPLIES, TOOLS
from whetstone.database.engine import chunks
from whetstone.domain.ids import HINDSIGHT

READ_AT_ONCE = 256
"""Answers whose following messages are in memory at a time."""
FOLLOWUPS: Mapping[str, Callable[[Sequence[Any]], str | None]] = {TOOLS: tool_error, REPLIES: user_reply}
"""By the source of the words: what reads them from the messages that followed an answer."""

c = schema.completions.c
_next = schema.completions.alias("next_turn")
n = _next.c
_GOES_ON = and_(
    n.project == c.project, n.trajectory_id == c.trajectory_id, or_(n.follows == c.id, n.id == c.continued_by)
)
_UNCHANGED = func.coalesce(n.redactions, 0) == 0


def find_followups(
    connection: Connection, claim: Claim, wanted: ExampleSelection, versions: Collection[int]
) -> list[Source]:
    """Return answers that such words followed: first those that no step has learned from, then the newest."""
    goes_on = select(n.id).where(_GOES_ON).correlate(schema.completions).exists()
    query = own_answers(claim, versions, f"{HINDSIGHT}/{wanted.source}").where(goes_on)
    answers = [Source(*row) for row in connection.execute(query)]
    sources: list[Source] = []
    for start in range(0, len(answers), READ_AT_ONCE):
        some = answers[start : start + READ_AT_ONCE]
        words = read_followups(connection, claim.project, wanted.source, [one.completion_id for one in some])
        sources += [one for one in some if one.completion_id in words]
        if len(sources) >= wanted.limit:
            break
    return sources[: wanted.limit]


def read_followups(
    connection: Connection, project: str, source: str, completion_ids: Collection[str]
) -> dict[str, str]:
    """Return the words that followed these completions, by completion; those without such words are absent."""
    query = (
        select(c.id, c.response, n.follows, n.new_messages, _UNCHANGED)
        .join(_next, _GOES_ON)
        .where(c.project == project)
        .order_by(c.id, n.turn)
    )
    words: dict[str, str] = {}
    seen: set[str] = set()
    for some in chunks(completion_ids, READ_AT_ONCE):
        for name, answer, follows, messages, unchanged in connection.execute(query.where(c.id.in_(some))):
            if name in seen:
                continue  # the first turn that goes on from an answer follows it
            seen.add(name)
            added = messages or () if follows == name else after_answer(messages or (), answer)
            if unchanged and (text := FOLLOWUPS[source](added)) is not None:
                words[name] = text
    return words
