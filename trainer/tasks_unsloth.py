"""The training worker with Unsloth. Unsloth patches transformers, so it is imported before everything else."""

import unsloth  # noqa: F401

from trainer.tasks import app, step

__all__ = ["app", "step"]
