"""What a supervised step reads: examples taken, rendered by vLLM where they are text, made rows. Knows the order."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from trainer.claims import Claim
from trainer.examples import Example, LeftOut, Rendered, Told, Wanted, WhyLeftOut, rendered
from trainer.learner.ends import end_ids
from trainer.lessons import Lessons
from trainer.patience import patiently
from trainer.replicas import Replicas
from trainer.rows import Answer, imitated
from trainer.store import Store
from whetstone.ids import version_id
from whetstone.settings import Settings
from whetstone.vllm import VllmRefused

STORED_AT_ONCE = 32
"""Examples rendered between two writes."""
BAD_REQUEST = 400

log = logging.getLogger(__name__)


def imitation(claim: Claim, wanted: Wanted, store: Store, replicas: Replicas, settings: Settings) -> Lessons:
    """The rows of the step's examples. Taken over, a step has the same ones, and what was rendered stays as it is.

    Raises:
        LeaseLost: another worker has the step.
        VllmDown: it did not come back in time.
        VllmRefused: it renders nothing, whatever the messages.
        ModelUnusable: the model's files do not say which tokens end an answer.
    """
    store.take_examples(claim, wanted)
    _render_missing(claim, store, replicas, settings)
    left_out: dict[str, str] = {}
    answers: defaultdict[str, list[Answer]] = defaultdict(list)
    for example in store.examples(claim):
        said = example.left_out or _answer(example, settings.trainer.max_row_tokens)
        if isinstance(said, str):
            left_out[example.source_id] = said
        else:
            answers[example.trajectory_id].append(said)
    store.rendered(claim, [Rendered(name, left_out=why) for name, why in left_out.items()])
    rows = [row for trajectory_id, said in answers.items() for row in imitated(trajectory_id, said)]
    count = sum(map(len, answers.values()))
    log.info("step %s: %d answers to imitate, %d left out", claim.id, count, len(left_out))
    return Lessons(tuple(rows), {}, {}, {name: why.partition(":")[0] for name, why in left_out.items()}, count)


def _answer(example: Example, max_row_tokens: int) -> Answer | str:
    """The example as a row takes it, or why it is left out."""
    assert example.prompt_ids is not None and example.token_ids is not None
    if len(example.prompt_ids) + len(example.token_ids) > max_row_tokens:
        return WhyLeftOut.TOO_LONG
    return Answer(example.source_id, example.prompt_ids, example.token_ids)


def _render_missing(claim: Claim, store: Store, replicas: Replicas, settings: Settings) -> None:
    """Have vLLM render what is text still, and store it."""
    waiting = [example for example in store.examples(claim) if example.told is not None]
    if not waiting:
        return
    ends = end_ids(settings.model)
    for some in _batches(waiting, STORED_AT_ONCE):
        done = []
        for example in some:
            store.renew(claim, settings.trainer.lease_s)
            done.append(patiently(partial(_render, claim, example, replicas, ends), claim, store, settings))
        store.rendered(claim, done)


def _render(claim: Claim, example: Example, replicas: Replicas, ends: frozenset[int]) -> Rendered:
    told = example.told
    assert told is not None
    try:
        return rendered(example.source_id, told, example.prompt_ids, _renders(claim, told, replicas), ends)
    except LeftOut as why:
        return Rendered(example.source_id, left_out=str(why))
    except VllmRefused as error:
        if error.status != BAD_REQUEST:  # of its own state, not of these messages
            raise
        return Rendered(example.source_id, left_out=f"{WhyLeftOut.REFUSED}: {error}")


def _renders(claim: Claim, told: Told, replicas: Replicas) -> Callable[[Sequence[Any], bool], Sequence[int]]:
    name = version_id(claim.policy, 0)
    return lambda messages, opened: replicas.any(
        lambda vllm: vllm.render(
            name, messages, opened=opened, tools=told.tools, template_arguments=told.template_arguments
        )
    )


def _batches(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
