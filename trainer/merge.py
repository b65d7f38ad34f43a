"""Merge an adapter into its base model (`python -m trainer.merge ADAPTER_FOLDER BASE_MODEL FOLDER`).

`whetstone versions export --merged` starts it. The written model needs no adapter: any program that reads transformers'
folders can serve it. Exit codes: 0 written; 2 not written, and the reason is on stderr.
"""

import os
import secrets
import shutil
import sys
from pathlib import Path

from trainer.adapters.files import TEMPORARY
from trainer.errors import AdapterExists, AdapterNotWritten, TrainerError
from trainer.learner.backends import folder_of
from trainer.learner.merged import merged
from whetstone.registry.adapters import AdapterDamaged

BESIDE_WEIGHTS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""Suffixes of the files in a model's folder other than weights: tokenizer, template, generation settings."""
INDEX = ".index.json"
"""Suffix of an index of weights; a new one is written."""


def merge(adapter_folder: Path, model_path: str, folder: Path) -> None:
    """Write the base model with the adapter in its weights, complete or not at all.

    Raises:
        AdapterExists: the folder is not empty; it is left unchanged.
        AdapterNotWritten: the disk is full or refuses the write; nothing exists under the final name.
        AdapterDamaged, AdapterMismatch, ModelUnusable: the two cannot be merged.
    """
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise AdapterExists(f"{folder}: there already; name a folder that is new or empty")
    model = merged(model_path, adapter_folder)
    standing = folder.parent / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(standing)
        for path in folder_of(model_path).iterdir():
            beside = path.suffix in BESIDE_WEIGHTS and not path.name.endswith(INDEX)
            if beside and not (standing / path.name).exists():
                shutil.copyfile(path, standing / path.name)
        standing.rename(folder)
    except OSError as error:
        raise AdapterNotWritten(f"{folder}: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(standing, ignore_errors=True)


def main() -> None:
    """Merge the adapter and model that the command line names."""
    if len(sys.argv) != 4:
        sys.exit("python -m trainer.merge ADAPTER_FOLDER BASE_MODEL FOLDER")
    try:
        merge(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except (TrainerError, AdapterDamaged) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
