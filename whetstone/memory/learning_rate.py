"""Choose AdamW's learning rate by the size of the base model."""

import math
from itertools import pairwise

from whetstone.config.trainer import TrainerSettings

ANCHORS = ((1e6, 1e-3), (1e8, 5e-5), (1e9, 5e-5), (7e9, 1e-5))
"""Parameters of the base model, and the learning rate of a rank-16 LoRA on it.

1e-3: the starter (0.8M) learns the demo with it. 5e-5: one step at 1e-3 moved SmolLM2-135M by 21 nats a token, at 5e-5
by 0.005, both measured here. 1e-5 from 7B: what published recipes of GRPO use (TRL's and verl's examples; Tülu 3,
arXiv 2411.15124, less); not run here."""


def learning_rate_for(parameters: int) -> float:
    """Return the learning rate, by straight lines between ANCHORS on logarithmic axes, with two digits."""
    size = min(max(float(parameters), ANCHORS[0][0]), ANCHORS[-1][0])
    for (small, rate_small), (large, rate_large) in pairwise(ANCHORS):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return float(f"{rate_small * (rate_large / rate_small) ** share:.1e}")
    raise AssertionError(size)


def learning_rate_of(settings: TrainerSettings, parameters: int) -> float:
    """Return the learning rate that is set, else the one for a base model of so many parameters."""
    return settings.learning_rate or learning_rate_for(parameters)
