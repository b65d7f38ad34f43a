from pathlib import Path

import pytest

from trainer.domain.base import fingerprint
from trainer.errors import ModelUnusable


def make(folder: Path, config: str = "{}", weights: bytes = b"w") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_copy_elsewhere_is_the_same_base_model(tmp_path: Path) -> None:
    here, there = fingerprint(make(tmp_path / "a" / "m"), "m"), fingerprint(make(tmp_path / "b"), "b")
    assert here.differs_in({"name": "b", **{key: getattr(there, key) for key in FIELDS}}) == []
    assert here.tokenizer_sha256 is None


def test_a_fingerprint_says_which_part_is_another(tmp_path: Path) -> None:
    base = fingerprint(make(tmp_path / "a"), "m")
    other = fingerprint(make(tmp_path / "b", weights=b"v"), "m")
    assert base.differs_in({key: getattr(other, key) for key in FIELDS}) == ["weights_sha256"]


def test_other_weights_than_safetensors_are_not_read(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelUnusable, match="no \\*.safetensors"):
        fingerprint(folder, "m")


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    folder = make(tmp_path / "a")
    (folder / "config.json").unlink()
    with pytest.raises(ModelUnusable, match="config.json"):
        fingerprint(folder, "m")


FIELDS = ("config_sha256", "weights_sha256", "tokenizer_sha256")
