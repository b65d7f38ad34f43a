"""What a side is given, and what it gives back."""

from typing import Literal

import msgspec

Generation = Literal["colocate", "transformers"]


class Run(msgspec.Struct, frozen=True):
    """One training run."""

    model: str
    """The base model's folder."""
    folder: str
    """For what the run writes."""
    seed: int
    learning_rate: float
    seconds: float
    """The run ends with the first step that ends later."""
    lora_rank: int
    lora_alpha: int
    groups: int
    """Tickets of a step."""
    attempts: int
    """Answers to each."""
    micro_batch: int
    """Answers of one of TRL's forward and backward passes."""
    generation: Generation | None = None
    """How TRL samples: by vLLM in its own process, or by transformers. None of ours."""


class Point(msgspec.Struct, frozen=True):
    """An adapter, and what it had cost."""

    adapter: str
    """Its folder."""
    seconds: float
    """Since training began, generation included, without the start of programs."""
    attempts: int
    """Answers sampled until then."""
    trained: int
    """Answers trained on until then."""
    tokens: int
    """Prompt and answer tokens of these."""
