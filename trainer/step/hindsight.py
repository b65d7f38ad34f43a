"""Build the rows of a step that learns from words: answers as sampled, beside the prompt with the correction in it."""

import logging
from collections.abc import Collection
from dataclasses import replace

from trainer.domain.claims import Claim
from trainer.domain.examples.corrections import TEMPLATE, CorrectedAnswer, with_correction
from trainer.domain.examples.sft_examples import CHAT, ExampleSelection, LeftOut, RenderedExample, WhyLeftOut
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Answer, Row, rows_for_sft
from trainer.step.supervised import or_left_out, render_missing, renders, without_details
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings

log = logging.getLogger(__name__)


def corrected_rows(
    claim: Claim,
    wanted: ExampleSelection,
    store: Store,
    replicas: Replicas,
    settings: Settings,
    unfit: Collection[str] = (),
) -> StepRows:
    """Return the rows of the step's corrected answers, one row for each.

    A step that is taken over has the same answers, and what was rendered stays. `unfit`: trajectories with rows that do
    not fit into the device's memory; their answers are left out.

    Raises:
        LeaseLost: another worker has the step.
        VllmDown: it did not come back in time.
        VllmRefused: it renders no messages at all.
    """
    trainer = settings.trainer
    store.take_corrections(claim, wanted, trainer.max_staleness)
    template = TEMPLATE if trainer.hindsight_template is None else trainer.hindsight_template.read_text("utf-8")
    waiting = [one for one in store.corrections(claim) if one.teacher_ids is None and one.left_out is None]
    render_missing(waiting, lambda one: _render(claim, one, template, replicas), claim, store, settings)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for one in store.corrections(claim):
        most_tokens = 0 if one.trajectory_id in unfit else trainer.max_row_tokens
        row = one.left_out or _row(one, most_tokens)
        if isinstance(row, str):
            left_out[one.source_id] = row
        else:
            rows.append(row)
    store.rendered(claim, [RenderedExample(name, left_out=why) for name, why in left_out.items()])
    log.info("step %s: %d corrected answers, %d left out", claim.id, len(rows), len(left_out))
    return StepRows(tuple(rows), {}, {}, without_details(left_out), len(rows))


def _row(one: CorrectedAnswer, max_row_tokens: int) -> Row | str:
    """Return its row, or why it has none."""
    assert one.teacher_ids is not None
    longest = max(len(one.prompt_ids), len(one.teacher_ids)) + len(one.token_ids)
    if longest > max_row_tokens:
        return WhyLeftOut.TOO_LONG
    (row,) = rows_for_sft(one.trajectory_id, [Answer(one.source_id, one.prompt_ids, one.token_ids)])
    return replace(row, teacher_ids=one.teacher_ids)


def _render(claim: Claim, one: CorrectedAnswer, template: str, replicas: Replicas) -> RenderedExample:
    def teacher() -> RenderedExample:
        if one.endpoint != CHAT:
            raise LeftOut(WhyLeftOut.NOT_A_CHAT)
        messages = with_correction(one.messages, one.correction, template)
        return RenderedExample(one.source_id, tuple(renders(claim, one, replicas)(messages, True)))

    return or_left_out(one.source_id, teacher)
