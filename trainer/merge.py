"""`python -m trainer.merge ADAPTER_FOLDER BASE_MODEL FOLDER`, which `whetstone versions export --merged` starts.

Writes a model that needs no adapter: any program that reads transformers' folders serves it. Exit codes: 0 written;
2 not, and why stands on stderr.
"""

import os
import secrets
import shutil
import sys
from pathlib import Path

from trainer.adapter import TEMPORARY
from trainer.errors import AdapterExists, AdapterNotWritten, TrainerError
from trainer.learner.backends import folder_of
from trainer.learner.merged import merged
from whetstone.adapters import AdapterDamaged

BESIDE_WEIGHTS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
"""How the names end of what a model's folder holds beside weights: tokenizer, template, generation's settings."""
INDEX = ".index.json"
"""How the name ends of a list of weights; those are written anew."""


def merge(adapter_folder: Path, model_path: str, folder: Path) -> None:
    """Write the base model with the adapter in its weights, whole or not at all.

    Raises:
        AdapterExists: something is in the folder; it is left alone.
        AdapterNotWritten: the disk is full or refuses; nothing stands under the final name.
        AdapterDamaged, AdapterMismatch, ModelUnusable: the two do not make a model.
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
    """Merge what the command line names."""
    if len(sys.argv) != 4:
        sys.exit("python -m trainer.merge ADAPTER_FOLDER BASE_MODEL FOLDER")
    try:
        merge(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except (TrainerError, AdapterDamaged) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
