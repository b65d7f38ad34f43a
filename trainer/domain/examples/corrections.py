"""Word a correction into the prompt that it is about. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.domain.examples.sft_examples import LeftOut, WhyLeftOut
from whetstone.config.trainer import CORRECTION

TEMPLATE = f"\n\n(Note: {CORRECTION})"
"""What is added to the last question without a template of the settings. Of four wordings, SmolLM2-135M-Instruct
followed this one most often (docs/log/learning.md).
"""


@dataclass(frozen=True, slots=True)
class CorrectedAnswer:
    """An answer of the policy, and what was written about it."""

    source_id: str
    """Id of its example."""
    trajectory_id: str
    prompt_ids: tuple[int, ...] = ()
    """As logged."""
    token_ids: tuple[int, ...] = ()
    """As sampled."""
    teacher_ids: tuple[int, ...] | None = None
    """The prompt with the correction in it, as rendered once; None until rendered."""
    endpoint: str = ""
    messages: Sequence[Any] = ()
    """The conversation before the answer."""
    tools: Any | None = None
    template_arguments: Mapping[str, Any] | None = None
    """The request's `chat_template_kwargs`."""
    correction: str = ""
    left_out: str | None = None
    """Why it teaches nothing; None where it does, or was not tried yet."""


def with_correction(messages: Sequence[Any], correction: str, template: str) -> list[Any]:
    """Return the conversation with the correction, worded by the template, behind the last question's text.

    Raises:
        LeftOut: no message of a user is there.
    """
    added = template.replace(CORRECTION, correction)
    for place in reversed(range(len(messages))):
        message = messages[place]
        if message.get("role") == "user":
            content = message.get("content")
            parts = [*content, {"type": "text", "text": added}] if isinstance(content, list) else f"{content}{added}"
            return [*messages[:place], {**message, "content": parts}, *messages[place + 1 :]]
    raise LeftOut(WhyLeftOut.NO_QUESTION)
