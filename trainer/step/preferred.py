"""Build the rows of a step that prefers the better of two answers of another policy, an imported log's for example."""

import logging
from collections.abc import Collection
from dataclasses import replace

from trainer.domain.claims import Claim
from trainer.domain.examples.sft_examples import ExampleSelection, RenderedExample, WhyLeftOut
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Row, rows_for_sft
from trainer.step.supervised import read_answers, without_details
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from whetstone.config.settings import Settings

log = logging.getLogger(__name__)


def preferred_rows(
    claim: Claim,
    wanted: ExampleSelection,
    store: Store,
    replicas: Replicas,
    settings: Settings,
    unfit: Collection[str] = (),
) -> StepRows:
    """Return the rows of the step's pairs: advantage 1 of the better trajectory, -1 of the worse.

    Both sides must begin with the same prompt and be whole: a pair of which one answer is left out teaches nothing.
    A step that is taken over has the same pairs, and what was rendered stays. `unfit`: trajectories with rows that do
    not fit into the device's memory; their pairs are left out.

    Raises:
        LeaseLost: another worker has the step.
        VllmDown: it did not come back in time.
        VllmRefused: it renders no messages at all.
        ModelUnusable: the model's files do not name the tokens that end an answer.
    """
    store.take_pairs(claim, wanted)
    read = read_answers(claim, store, replicas, settings, unfit)
    answers, left_out = read.answers, read.left_out
    first_prompts = {name: own[0].prompt_ids for name, own in answers.items() if name not in read.incomplete}
    rows: list[Row] = []
    taught: set[str] = set()
    for better, worse in store.pairs(claim):
        if {better, worse} <= first_prompts.keys() and first_prompts[better] == first_prompts[worse]:
            taught |= {better, worse}
            for name, advantage in ((better, 1.0), (worse, -1.0)):
                rows += [replace(row, pair=better) for row in rows_for_sft(name, answers[name], advantage)]
    for name, own in answers.items():
        if name not in taught:
            left_out |= dict.fromkeys((one.source_id for one in own), WhyLeftOut.NO_PAIR.value)
    store.rendered(claim, [RenderedExample(name, left_out=why) for name, why in left_out.items()])
    log.info("step %s: %d pairs, %d answers left out", claim.id, len(taught) // 2, len(left_out))
    count = sum(len(answers[name]) for name in taught)
    return StepRows(tuple(rows), {}, {}, without_details(left_out), count)
