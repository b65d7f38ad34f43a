"""Build the rows of a step that learns from a teacher: the policy's answers, with the teacher's likeliest tokens."""

import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

from trainer.domain.claims import Claim
from trainer.domain.examples.own_answers import OwnAnswer
from trainer.domain.examples.sft_examples import ExampleSelection, RenderedExample, WhyLeftOut
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row, rows_for_sft
from trainer.errors import TeacherUnusable
from trainer.learner.base.model_files import vocabulary_size
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from trainer.vllm.retry import retry_while_down
from trainer.vllm.teacher import AnswerRefused, Teacher
from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id

AT_ONCE = 8
"""Answers that the teacher scores at the same time; the lease is renewed between such batches."""

log = logging.getLogger(__name__)


def scored_rows(
    claim: Claim,
    wanted: ExampleSelection,
    store: Store,
    replicas: Replicas,
    settings: Settings,
    unfit: Collection[str] = (),
) -> StepRows:
    """Return the rows of the step's answers with the teacher's likeliest tokens, one row for each.

    A step that is taken over has the same answers, and the teacher is asked again. `unfit`: trajectories with rows that
    do not fit into the device's memory; their answers are left out.

    Raises:
        TeacherUnusable: the teacher is not there, or is none for this policy.
        LeaseLost: another worker has the step.
        VllmDown: the policy's own server did not come back in time.
    """
    store.take_own_answers(claim, wanted, settings.trainer.max_staleness)
    if (teacher_settings := settings.teachers.get(wanted.source)) is None:
        raise TeacherUnusable(f"no teacher is named {wanted.source!r}: add [teachers.{wanted.source}] to the settings")
    top, vocabulary = settings.trainer.distill_top, vocabulary_size(settings.model)
    with closing(Teacher(wanted.source, teacher_settings, top, vocabulary)) as teacher:
        name = version_id(claim.policy, 0)

        def tokens_of(text: str) -> list[int]:
            return retry_while_down(
                lambda: replicas.any(lambda vllm: vllm.tokenize(name, text)), claim, store, settings
            )

        teacher.check(settings.all_trained, tokens_of)
        rows: list[Row] = []
        left_out: dict[str, str] = {}
        answers = store.own_answers(claim)
        for some in _batches(answers):
            store.renew(claim, settings.trainer.lease_s)
            with ThreadPoolExecutor(max_workers=AT_ONCE) as threads:
                scored = threads.map(lambda one: _row(one, teacher, settings.trainer.max_row_tokens, unfit), some)
                for one, row in zip(some, scored, strict=True):
                    if isinstance(row, str):
                        left_out[one.answer.source_id] = row
                    else:
                        rows.append(row)
    store.rendered(claim, [RenderedExample(name, left_out=why) for name, why in left_out.items()])
    log.info("step %s: %d answers scored by %s, %d left out", claim.id, len(rows), wanted.source, len(left_out))
    reasons = {name: why.partition(":")[0] for name, why in left_out.items()}
    return StepRows(tuple(rows), {}, {}, reasons, len(rows))


def _row(one: OwnAnswer, teacher: Teacher, max_row_tokens: int, unfit: Collection[str]) -> Row | str:
    """Return its row, or why it has none."""
    if one.left_out is not None:
        return one.left_out
    answer = one.answer
    if one.trajectory_id in unfit or len(answer.prompt_ids) + len(answer.token_ids) > max_row_tokens:
        return WhyLeftOut.TOO_LONG
    try:
        top = teacher.scores(answer.prompt_ids, answer.token_ids)
    except AnswerRefused as error:
        return f"{WhyLeftOut.NO_SCORES}: {error}"
    (row,) = rows_for_sft(one.trajectory_id, [answer])
    return replace(row, top_ids_N=top.ids_N, top_logprobs_N=top.logprobs_N)


def _batches(answers: Sequence[OwnAnswer]) -> Iterator[Sequence[OwnAnswer]]:
    for start in range(0, len(answers), AT_ONCE):
        yield answers[start : start + AT_ONCE]
