"""Select and read the answers that words correct, beside the ids that were sampled.

They are stored as examples (`trainer.store.examples.answers`) under ids of their own (`HINDSIGHT`): the same feedback
or completion may be imitated as well.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, and_, func, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.corrections import CorrectedAnswer
from trainer.domain.examples.sft_examples import ExampleSelection, WhyLeftOut
from trainer.store.examples.answers import messages_of, of_step, prompt_of, with_chains
from trainer.store.examples.explanations import explained_answers, read_explanations
from trainer.store.examples.followups import FOLLOWUPS, find_followups, read_followups
from trainer.store.examples.sources import USABLE, Source, about_answers, whole_answers
from whetstone.config.trainer import COMMENTS, JUDGE
from whetstone.domain.ids import HINDSIGHT

c, e, f = schema.completions.c, schema.examples.c, schema.feedback.c


def find_corrections(
    connection: Connection, claim: Claim, wanted: ExampleSelection, versions: Collection[int]
) -> list[Source]:
    """Return the answers that the step learns from: first those that no step has learned from, then the newest.

    They are complete answers that one of `versions` of the policy sampled, with the newest words about each.
    """
    if wanted.source in FOLLOWUPS:
        return find_followups(connection, claim, wanted, versions)
    if wanted.source == JUDGE:
        corrected = explained_answers(claim)
    else:
        corrected = about_answers(claim, f.comment if wanted.source == COMMENTS else f.demonstration)
    source_id = corrected.c.id + ("" if wanted.source == JUDGE else HINDSIGHT)
    known = and_(e.project == claim.project, e.policy == claim.policy, e.source_id == source_id)
    query = (
        select(source_id, corrected.c.trajectory_id, corrected.c.completion_id)
        .join(schema.completions, and_(c.project == claim.project, c.id == corrected.c.completion_id))
        .join(schema.examples, known, isouter=True)
        .where(corrected.c.place == 1, *whole_answers(claim, versions), USABLE)
        .order_by(func.coalesce(e.step, 0), corrected.c.created_at.desc(), corrected.c.id)
        .limit(wanted.limit)
    )
    return [Source(*row) for row in connection.execute(query)]


def read_corrections(connection: Connection, claim: Claim) -> list[CorrectedAnswer]:
    """Return the step's corrected answers, by trajectory and turn. Those whose words were deleted are absent."""
    words = _words(connection, claim)
    query = (
        select(e.source_id, e.trajectory_id, e.completion_id, e.prompt_token_ids, e.left_out)
        .join(schema.completions, and_(c.project == e.project, c.id == e.completion_id))
        .where(*of_step(claim))
        .order_by(e.trajectory_id, c.turn, e.source_id)
    )
    answers = []
    for row, chain in with_chains(connection, claim, query):
        if row.source_id not in words:
            continue
        last, prompt_ids, correction = chain[-1], prompt_of(chain), words[row.source_id]
        lacks = prompt_ids is None or not last.token_ids or not correction
        answers.append(
            CorrectedAnswer(
                source_id=row.source_id,
                trajectory_id=row.trajectory_id,
                prompt_ids=prompt_ids or (),
                token_ids=tuple(last.token_ids or ()),
                teacher_ids=None if row.prompt_token_ids is None else tuple(row.prompt_token_ids),
                endpoint=last.endpoint,
                messages=messages_of(chain),
                tools=next((one.tools for one in reversed(chain) if one.tools is not None), None),
                template_arguments=(last.sampling or {}).get("chat_template_kwargs"),
                correction=correction,
                left_out=row.left_out or (WhyLeftOut.NOT_A_CHAT.value if lacks else None),
            )
        )
    return answers


def _words(connection: Connection, claim: Claim) -> dict[str, str]:
    """Return the words of the step's examples, by example; an empty text where a demonstration has none."""
    of_feedback = and_(f.project == e.project, f.id + HINDSIGHT == e.source_id)
    query = select(e.source_id, e.source, f.comment, f.demonstration).join(schema.feedback, of_feedback)
    words = {
        row.source_id: (row.comment if row.source == COMMENTS else _text_of(row.demonstration)) or ""
        for row in connection.execute(query.where(*of_step(claim)))
    }
    rows = connection.execute(select(e.source, e.source_id, e.completion_id).where(*of_step(claim))).all()
    words |= read_explanations(connection, claim.project, {row.source_id for row in rows if row.source == JUDGE})
    for source in FOLLOWUPS:
        ids = {row.completion_id: row.source_id for row in rows if row.source == source}
        followed = read_followups(connection, claim.project, source, ids)
        words |= {ids[completion_id]: text for completion_id, text in followed.items()}
    return words


def _text_of(demonstration: Any) -> str | None:
    """Return the text of the message; None where it has none, as where it calls tools."""
    content = demonstration.get("content") if isinstance(demonstration, dict) else None
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict)) or None
    return content if isinstance(content, str) else None
