"""Settings of a training service: a server of the Tinker API that computes a policy's steps instead of this machine."""

from typing import Literal

from pydantic import Field

from whetstone.config.rewards import VARIABLE, Section, Url
from whetstone.config.trainer import LossName, TrainerSettings

Adds = Literal["tokens", "row_means"]
"""What a server's loss adds up."""
LOSSES: tuple[LossName, ...] = ("cispo", "dapo", "grpo", "dr_grpo")
"""The losses of `trainer.loss` that the API knows."""
ALONE: tuple[str, ...] = (
    "objective", "kl_weight", "entropy_weight", "replay_share", "echo_weight", "max_ratio", "max_sequence_ratio",
    "tv_regulariser", "lora_alpha", "backend", "sharding", "quantisation", "processes", "policies_at_once",
)  # fmt: skip
"""Settings of the trainer that mean something only where it computes by itself: they keep their defaults."""


class TrainingServiceSettings(Section):
    """A server that speaks the Tinker API: Tinker's own, or one of SkyRL's. It has the base model and the optimizer;
    the training worker sends it rows and gets adapters."""

    url: Url
    """Base URL of the server, without `/api/v1`: `http://skyrl:8000`."""
    model: str | None = Field(None, min_length=1)
    """The base model's name on that server; unset: that of the setting `model`."""
    api_key_env: str | None = Field(None, pattern=VARIABLE)
    """Environment variable that holds its API key; unset: no key is sent."""
    sums: Adds = "tokens"
    """What the server's loss adds up: all tokens, as Tinker does (`tokens`), or the means of the rows, which are
    averaged, as SkyRL's JAX backend does (`row_means`). If it is set wrongly, rows of different lengths weigh
    differently than `trainer.loss` says."""
    timeout_s: float = Field(600, gt=0)
    """Longest that the server may take for one piece of work, before the step waits and begins again."""

    def check(self, trainer: TrainerSettings) -> None:
        """Check that a service can do what the trainer's settings ask for.

        Raises:
            ValueError: it cannot; the message gives the setting and its value.
        """
        if trainer.loss not in LOSSES:
            raise ValueError(
                f"a training service has no loss {trainer.loss}: set trainer.loss to {', '.join(LOSSES[:-1])} or "
                f"{LOSSES[-1]}"
            )
        for name in ALONE:
            default = TrainerSettings.model_fields[name].default
            if (value := getattr(trainer, name)) != default:
                raise ValueError(
                    f"trainer.{name} is {value}, which a training service does not do: set it to "
                    f"{'nothing' if default is None else default}, or remove training_service"
                )
