"""Identify a base model by hashes of its files. Loads no weights."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import ModelUnusable


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base model's fingerprint. `name` is its folder's last part, never a path; only the hashes are compared."""

    name: str
    config_sha256: str
    weights_sha256: str
    """Hash of all *.safetensors, names and contents, in name order."""
    tokenizer_sha256: str | None
    """Hash of the tokenizer's files; None where the folder has none."""

    def differs_in(self, other: dict[str, object]) -> list[str]:
        """Return the names of the hashes that differ from another fingerprint, which was read from a manifest."""
        return [key for key, value in asdict(self).items() if key != "name" and other.get(key) != value]


def fingerprint(folder: Path, name: str) -> BaseModel:
    """Hash the model's files; reads every byte of the weights.

    Raises:
        ModelUnusable: no config.json, no safetensors (pickled weights are never read), or a file cannot be read.
    """
    try:
        weights = sorted(folder.glob("*.safetensors"))
        if not weights:
            raise ModelUnusable(f"{folder}: no *.safetensors; weights in other formats are not read")
        tokenizer = [
            path
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
            if (path := folder / file).exists()
        ]
        return BaseModel(
            name=name,
            config_sha256=_sha256([folder / "config.json"]),
            weights_sha256=_sha256(weights),
            tokenizer_sha256=_sha256(tokenizer) if tokenizer else None,
        )
    except OSError as error:
        raise ModelUnusable(f"{folder}: {error}") from error


def _sha256(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            # The name and the fixed-length inner hash make sure that two files are never hashed like one.
            total.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()
