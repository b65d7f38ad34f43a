"""Read from the model's files, without its weights, how many tokens it has, and which end an answer, as vLLM does."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from trainer.errors import ModelUnusable

FILES = ("config.json", "generation_config.json")


def end_ids(model_path: str | Path) -> frozenset[int]:
    """Return the ids that stop a generation.

    Raises:
        ModelUnusable: a file cannot be read, or none names such an id.
    """
    ends = {token_id for name in FILES for token_id in _ids(_read(model_path, name).get("eos_token_id"))}
    if not ends:
        raise ModelUnusable(f"{model_path}: no eos_token_id in {' or '.join(FILES)}; add the token that ends an answer")
    return frozenset(ends)


def vocabulary_size(model_path: str | Path) -> int | None:
    """Return how many tokens the model has logits of; None where its files do not say it.

    Raises:
        ModelUnusable: `config.json` cannot be read.
    """
    config = _read(model_path, FILES[0])
    size = config.get("text_config", config).get("vocab_size")
    return size if isinstance(size, int) else None


def ends_of(causal: PreTrainedModel) -> frozenset[int]:
    """Return the same ids of a loaded model; empty where it names none."""
    configs = (causal.config.get_text_config(), causal.generation_config)
    return frozenset().union(*(_ids(getattr(config, "eos_token_id", None)) for config in configs))


def _ids(eos: list[int] | int | None) -> set[int]:
    """Return the ids of a configuration's `eos_token_id`."""
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _read(model_path: str | Path, name: str) -> dict[str, Any]:
    """Return one of the files; empty where the model has none."""
    try:
        path = cached_file(str(model_path), name, _raise_exceptions_for_missing_entries=False)
        config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{model_path}: {name}: {error}") from error
    return config
