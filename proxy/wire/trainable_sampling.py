"""Decide whether a request's sampling leaves the logprobs those of the model at its temperature. Pure."""

from collections.abc import Mapping
from typing import Any

ALWAYS = frozenset(
    {
        "model",
        "max_tokens",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "temperature",
        "user",
        "metadata",
        "return_token_ids",
    }
)
"""The closed list of fields that never change the logprobs, in any dialect."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "tool_choice": ("auto", "none"),
    "echo": (False,),
}
"""Values at which a field changes nothing, as if it were left out."""


def why_bent(values: Mapping[str, Any], harmless: frozenset[str]) -> str | None:
    """Return why these values change the logprobs, or None if they do not.

    `harmless` is ALWAYS and the dialect's own such fields. The result is `greedy`, or `sampling_bent: <field>` with the
    first such field. A field that is not known to be harmless counts as one that changes them.
    """
    temperature = values.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
            return "sampling_bent: temperature"
        if temperature == 0:
            return "greedy"
    if harmless.issuperset(values):
        return None
    for field, value in values.items():
        if not (field in harmless or value is None or value in NEUTRAL.get(field, ())):
            return f"sampling_bent: {field[:100]}"
    return None
