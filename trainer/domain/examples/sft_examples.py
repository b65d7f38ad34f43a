"""Turn answers to imitate from text into token ids. Pure: the caller passes the function that renders."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from trainer.errors import TrainerError

CHAT = "chat.completions"
TEXT = "completions"
ENDED = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of an answer that is complete."""
STAND_IN = ({"role": "user", "content": "?"},)
"""Rendered in place of a conversation in another dialect: an answer's ids depend on what opens it."""
ANSWER_FIELDS = ("role", "content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of an answer that a template may render; servers add others."""

Render = Callable[[Sequence[Any], bool], Sequence[int]]
"""(messages, whether the template opens an answer after them) -> their token ids."""


@dataclass(frozen=True, slots=True)
class ExampleSelection:
    """What a supervised step imitates."""

    source: str
    """`demonstrations`, `best`, or the policy whose answers it learns from."""
    min_reward: float | None
    """Lowest reward of a trajectory that is imitated; None: any reward, and for `best` the best trajectory of each
    group.
    """
    limit: int
    """Largest number of demonstrations or trajectories."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Self:
        """Build it from the value of `policies.step_asked` or `steps.imitates`."""
        return cls(request["from"], request.get("min_reward"), request["limit"])


class WhyLeftOut(StrEnum):
    """Why an example cannot be learned from; the value of `examples.left_out`."""

    NOT_A_CHAT = "not_a_chat"
    """It is not a chat but in another dialect, and its ids are unknown: we have no template that renders it."""
    CUT_OFF = "cut_off"
    """The answer did not end by itself: its rendering would end where the answer did not."""
    REFUSED = "refused"
    """vLLM does not render it; vLLM's message follows."""
    REWRITTEN = "rewritten"
    """The template renders the prompt differently once the answer follows it."""
    OPENED_OTHERWISE = "opened_otherwise"
    """The logged prompt does not end as the template opens an answer."""
    NO_END = "no_end"
    """The answer does not end with one of the model's end tokens, or has one inside."""
    NO_QUESTION = "no_question"
    """Words correct it, and its conversation has no message of a user to which they could be added."""
    NO_PAIR = "no_pair"
    """The other side of its pair is left out, or answers another prompt."""
    NO_SCORES = "no_scores"
    """The teacher gives no logprobs for it; the teacher's message follows."""
    TOO_LONG = "too_long"
    """Prompt and answer are longer than `trainer.max_row_tokens`. Later steps try again: the setting may change."""


class LeftOut(TrainerError):
    """An example cannot be imitated; the message begins with its WhyLeftOut."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer as text, and what it answers."""

    endpoint: str
    messages: Sequence[Any]
    """The whole conversation before it, in the endpoint's dialect."""
    tools: Any | None
    template_arguments: Mapping[str, Any] | None
    """The request's `chat_template_kwargs`."""
    answer: Mapping[str, Any] | None
    """The assistant's message; None where there is only a text."""
    whole: bool
    """It ended by itself."""


@dataclass(frozen=True, slots=True)
class Example:
    """One answer to imitate."""

    source_id: str
    """Id of the feedback or completion that it was made from."""
    trajectory_id: str
    prompt_ids: tuple[int, ...] | None = None
    """The ids as logged, else as rendered once; None until rendered."""
    token_ids: tuple[int, ...] | None = None
    """The answer's ids, with the same rule."""
    text: AnswerText | None = None
    """What has to be rendered; None where nothing has."""
    left_out: str | None = None
    """Why it cannot be imitated; None where it can, or was not tried yet."""


@dataclass(frozen=True, slots=True)
class RenderedExample:
    """What is stored of an example after rendering."""

    source_id: str
    prompt_ids: tuple[int, ...] | None = None
    """None where the log has the prompt's ids."""
    token_ids: tuple[int, ...] | None = None
    left_out: str | None = None


def rendered(
    source_id: str, text: AnswerText, prompt_ids: tuple[int, ...] | None, render: Render, ends: Set[int]
) -> RenderedExample:
    """Return the answer's ids after the logged prompt or, where `prompt_ids` is None, after a rendered prompt.

    The answer is what the template adds to the opened prompt, up to the end token that the model would sample; what a
    template writes after that token belongs to the next turn. `ends`: the model's end tokens.

    Raises:
        LeftOut: it cannot be imitated exactly.
    """
    if text.answer is None or text.endpoint == TEXT or (prompt_ids is None and text.endpoint != CHAT):
        raise LeftOut(WhyLeftOut.NOT_A_CHAT)
    if not text.whole:
        raise LeftOut(WhyLeftOut.CUT_OFF)
    messages = text.messages if text.endpoint == CHAT else STAND_IN
    answer = {name: value for name in ANSWER_FIELDS if (value := text.answer.get(name)) is not None}
    opened = tuple(render(messages, True))
    closed = tuple(render([*messages, answer], False))
    if closed[: len(opened)] != opened:
        raise LeftOut(WhyLeftOut.REWRITTEN)
    token_ids = _up_to_the_end(closed[len(opened) :], ends)
    if prompt_ids is None:
        return RenderedExample(source_id, opened, token_ids)
    opening = opened[len(render(messages, False)) :]
    if prompt_ids[len(prompt_ids) - len(opening) :] != opening:
        raise LeftOut(WhyLeftOut.OPENED_OTHERWISE)
    return RenderedExample(source_id, None, token_ids)


def _up_to_the_end(token_ids: tuple[int, ...], ends: Set[int]) -> tuple[int, ...]:
    places = [place for place, token_id in enumerate(token_ids) if token_id in ends]
    if len(places) != 1:
        raise LeftOut(WhyLeftOut.NO_END)
    return token_ids[: places[0] + 1]
