"""The training worker where Unsloth computes: it patches transformers, so it is imported before anything else is."""

import unsloth  # noqa: F401

from trainer.tasks import app, step

__all__ = ["app", "step"]
