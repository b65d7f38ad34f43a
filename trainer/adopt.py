"""Convert an adapter of peft into one of ours (`python -m trainer.adopt SOURCE FOLDER`).

`whetstone versions import` starts it. Settings come from the environment. Prints one JSON object. Exit codes: 0
written; 2 it is no adapter that we can serve.
"""

import sys
from pathlib import Path

import msgspec

from trainer.adapters import files
from trainer.errors import TrainerError
from trainer.learner import imported_lora
from trainer.learner.merged import in_bf16
from whetstone.config.settings import SettingsError, load
from whetstone.registry.adapters import StoreError
from whetstone.registry.remote.object_store import store_of
from whetstone.vllm.client import max_lora_rank


class AdoptionResult(msgspec.Struct, frozen=True):
    """What was written, and whether a step can continue from it."""

    manifest_sha256: str
    rank: int
    """The highest rank of its layers."""
    why_no_step: str | None
    """Why no step can continue from it with the present settings; None where one can."""


def adopt(source: Path, folder: Path) -> AdoptionResult:
    """Write the adapter together with a fresh optimizer.

    Raises:
        TrainerError: it is no LoRA of this base model, or the disk refuses the write.
        StoreError: it cannot be published; its folder stays.
        SettingsError: the settings cannot be used.
    """
    settings = load()
    learner = imported_lora.adopt(settings.model, source, settings.trainer, settings.seed, max_lora_rank(settings))
    config = msgspec.json.decode(learner.files()["adapter_config.json"])
    rank, alpha, trainer = config["r"], config["lora_alpha"], settings.trainer
    store = store_of(settings.adapters)
    manifest_sha256 = files.write(folder, learner, parent=0, step=0, in_bf16=None if store is None else in_bf16)
    if store is not None:
        store.publish(folder)
    why_no_step = None
    if (rank, alpha) != (trainer.lora_rank, trainer.lora_alpha):
        wanted = f"trainer.lora_rank and trainer.lora_alpha are {trainer.lora_rank} and {trainer.lora_alpha}"
        why_no_step = f"its rank is {rank} and its alpha {alpha}, {wanted}"
    return AdoptionResult(manifest_sha256, max(rank, *config["rank_pattern"].values(), 0), why_no_step)


def main() -> None:
    """Adopt the adapter that the command line names."""
    if len(sys.argv) != 3:
        sys.exit("python -m trainer.adopt SOURCE FOLDER")
    try:
        written = adopt(Path(sys.argv[1]), Path(sys.argv[2]))
    except (TrainerError, SettingsError, StoreError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.stdout.write(msgspec.json.encode(written).decode() + "\n")


if __name__ == "__main__":
    main()
