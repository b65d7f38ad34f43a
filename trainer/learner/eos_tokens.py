"""Read which tokens end an answer, in the same way as vLLM: the eos ids in the model's files."""

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import cached_file

from trainer.errors import ModelUnusable

FILES = ("config.json", "generation_config.json")


def end_ids(model_path: str | Path) -> frozenset[int]:
    """Return the ids that stop a generation.

    Raises:
        ModelUnusable: a file cannot be read, or none names such an id.
    """
    ends: set[int] = set()
    for name in FILES:
        try:
            path = cached_file(str(model_path), name, _raise_exceptions_for_missing_entries=False)
            config = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        except (OSError, ValueError) as error:
            raise ModelUnusable(f"{model_path}: {name}: {error}") from error
        ends |= _ids(config.get("eos_token_id"))
    if not ends:
        raise ModelUnusable(f"{model_path}: no eos_token_id in {' or '.join(FILES)}; add the token that ends an answer")
    return frozenset(ends)


def ends_of(causal: PreTrainedModel) -> frozenset[int]:
    """Return the same ids of a loaded model; empty where it names none."""
    configs = (causal.config.get_text_config(), causal.generation_config)
    return frozenset().union(*(_ids(getattr(config, "eos_token_id", None)) for config in configs))


def _ids(eos: list[int] | int | None) -> set[int]:
    """Return the ids of a configuration's `eos_token_id`."""
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])
