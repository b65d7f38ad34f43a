"""Select and read the policy's own answers that a teacher is to score.

They are stored as examples (`trainer.store.examples.answers`), whose ids end with the teacher's name: several teachers
may score the same answer.
"""

from collections.abc import Collection

from sqlalchemy import Connection, and_, select

from migrations import schema
from trainer.domain.claims import Claim
from trainer.domain.examples.own_answers import OwnAnswer
from trainer.domain.examples.sft_examples import ExampleSelection, WhyLeftOut
from trainer.domain.rows import Answer
from trainer.store.examples.answers import of_step, prompt_of, with_chains
from trainer.store.examples.sources import Source, own_answers

c, e = schema.completions.c, schema.examples.c


def find_own_answers(
    connection: Connection, claim: Claim, wanted: ExampleSelection, versions: Collection[int]
) -> list[Source]:
    """Return the answers that the step learns from: first those this teacher has not scored yet, then the newest.

    They are complete answers that one of `versions` of the policy sampled.
    """
    query = own_answers(claim, versions, f"/distill/{wanted.source}").limit(wanted.limit)
    return [Source(*row) for row in connection.execute(query)]


def read_own_answers(connection: Connection, claim: Claim) -> list[OwnAnswer]:
    """Return the step's answers, by trajectory and turn."""
    query = (
        select(e.source_id, e.trajectory_id, e.completion_id, e.left_out)
        .join(schema.completions, and_(c.project == e.project, c.id == e.completion_id))
        .where(*of_step(claim))
        .order_by(e.trajectory_id, c.turn, e.source_id)
    )
    answers = []
    for row, chain in with_chains(connection, claim, query):
        prompt_ids, token_ids = prompt_of(chain), tuple(chain[-1].token_ids or ())
        lacks = None if prompt_ids and token_ids else WhyLeftOut.NOT_A_CHAT.value
        answer = Answer(row.source_id, prompt_ids or (), token_ids)
        answers.append(OwnAnswer(row.trajectory_id, answer, row.left_out or lacks))
    return answers
