"""Build a supervised step's rows: take examples, have vLLM render those that are text, merge them."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from trainer.domain.claims import Claim
from trainer.domain.examples.corrections import CorrectedAnswer
from trainer.domain.examples.sft_examples import (
    AnswerText,
    Example,
    ExampleSelection,
    LeftOut,
    Render,
    RenderedExample,
    WhyLeftOut,
    rendered,
)
from trainer.domain.row_builder import StepRows
from trainer.domain.rows import Answer, rows_for_sft
from trainer.learner.base.model_files import end_ids
from trainer.store.unit_of_work import Store
from trainer.vllm.pool import Replicas
from trainer.vllm.retry import retry_while_down
from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id
from whetstone.vllm.client import VllmRefused

STORED_AT_ONCE = 32
"""Examples rendered between two writes."""
BAD_REQUEST = 400
Waiting = TypeVar("Waiting")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadAnswers:
    """What the examples of a step are."""

    answers: Mapping[str, Sequence[Answer]]
    """By trajectory, in turn order."""
    left_out: dict[str, str]
    """By example, why it is left out."""
    incomplete: Set[str]
    """The trajectories of which an answer is left out."""


def imitation(
    claim: Claim,
    wanted: ExampleSelection,
    store: Store,
    replicas: Replicas,
    settings: Settings,
    unfit: Collection[str] = (),
) -> StepRows:
    """Return the rows of the step's examples.

    A step that is taken over has the same examples, and what was rendered stays. `unfit`: trajectories with rows that
    do not fit into the device's memory; their examples are left out.

    Raises:
        LeaseLost: another worker has the step.
        VllmDown: it did not come back in time.
        VllmRefused: it renders no messages at all.
        ModelUnusable: the model's files do not name the tokens that end an answer.
    """
    store.take_examples(claim, wanted)
    return example_rows(claim, store, replicas, settings, unfit)


def example_rows(
    claim: Claim, store: Store, replicas: Replicas, settings: Settings, unfit: Collection[str] = ()
) -> StepRows:
    """Return the rows of the examples that the step has taken; see `imitation`."""
    read = read_answers(claim, store, replicas, settings, unfit)
    answers, left_out = read.answers, read.left_out
    store.rendered(claim, [RenderedExample(name, left_out=why) for name, why in left_out.items()])
    rows = [row for trajectory_id, answer in answers.items() for row in rows_for_sft(trajectory_id, answer)]
    count = sum(map(len, answers.values()))
    log.info("step %s: %d answers to imitate, %d left out", claim.id, count, len(left_out))
    return StepRows(tuple(rows), {}, {}, without_details(left_out), count)


def read_answers(
    claim: Claim, store: Store, replicas: Replicas, settings: Settings, unfit: Collection[str]
) -> ReadAnswers:
    """Return the answers of the step's examples.

    vLLM renders those that are still text, once. Raises as `imitation` does.
    """
    _render_missing(claim, store, replicas, settings)
    left_out: dict[str, str] = {}
    incomplete: set[str] = set()
    answers: defaultdict[str, list[Answer]] = defaultdict(list)
    for example in store.examples(claim):
        most_tokens = 0 if example.trajectory_id in unfit else settings.trainer.max_row_tokens
        answer = example.left_out or _answer(example, most_tokens)
        if isinstance(answer, str):
            left_out[example.source_id] = answer
            incomplete.add(example.trajectory_id)
        else:
            answers[example.trajectory_id].append(answer)
    return ReadAnswers(answers, left_out, incomplete)


def without_details(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons without the server's messages that follow some of them."""
    return {name: why.partition(":")[0] for name, why in left_out.items()}


def _answer(example: Example, max_row_tokens: int) -> Answer | str:
    """Return the example as a row takes it, or why it is left out."""
    assert example.prompt_ids is not None and example.token_ids is not None
    if len(example.prompt_ids) + len(example.token_ids) > max_row_tokens:
        return WhyLeftOut.TOO_LONG
    return Answer(example.source_id, example.prompt_ids, example.token_ids)


def _render_missing(claim: Claim, store: Store, replicas: Replicas, settings: Settings) -> None:
    """Have vLLM render the examples that are still text, and store the results."""
    waiting = [example for example in store.examples(claim) if example.text is not None]
    if waiting:
        ends = end_ids(settings.model)
        render_missing(waiting, lambda example: _render(claim, example, replicas, ends), claim, store, settings)


def render_missing(
    waiting: Sequence[Waiting],
    render: Callable[[Waiting], RenderedExample],
    claim: Claim,
    store: Store,
    settings: Settings,
) -> None:
    """Render each, and store the results some at a time.

    Raises:
        LeaseLost: another worker has the step.
        VllmDown: it did not come back in time.
    """
    for some in _batches(waiting, STORED_AT_ONCE):
        done = []
        for one in some:
            store.renew(claim, settings.trainer.lease_s)
            done.append(retry_while_down(partial(render, one), claim, store, settings))
        store.rendered(claim, done)


def _render(claim: Claim, example: Example, replicas: Replicas, ends: frozenset[int]) -> RenderedExample:
    text = example.text
    assert text is not None
    render = renders(claim, text, replicas)
    return or_left_out(example.source_id, lambda: rendered(example.source_id, text, example.prompt_ids, render, ends))


def or_left_out(source_id: str, render: Callable[[], RenderedExample]) -> RenderedExample:
    """Return what is rendered, or why it cannot be: by our rules, or as vLLM refuses these messages."""
    try:
        return render()
    except LeftOut as why:
        return RenderedExample(source_id, left_out=str(why))
    except VllmRefused as error:
        if error.status != BAD_REQUEST:  # about the server's state, not about these messages
            raise
        return RenderedExample(source_id, left_out=f"{WhyLeftOut.REFUSED}: {error}")


def renders(claim: Claim, text: AnswerText | CorrectedAnswer, replicas: Replicas) -> Render:
    """Return the function by which vLLM renders messages with the tools and template arguments of `text`."""
    name = version_id(claim.policy, 0)
    return lambda messages, opened: replicas.any(
        lambda vllm: vllm.render(
            name, messages, opened=opened, tools=text.tools, template_arguments=text.template_arguments
        )
    )


def _batches(examples: Sequence[Waiting], size: int) -> Iterator[Sequence[Waiting]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]
