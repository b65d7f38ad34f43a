"""Adapters that are missing in vLLM are loaded, each checked before; a bad one stops no other."""

import hashlib
import json
from pathlib import Path

import pytest

from whetstone.registry.adapters import (
    FORMAT,
    MANIFEST,
    OPTIMIZER_STATE,
    WEIGHTS,
    AdapterDamaged,
    load_missing,
    verify,
)
from whetstone.vllm.client import Vllm, VllmRefused


class Loads(Vllm):
    """vLLM's control calls without its HTTP: keeps what it was told to load, and refuses what it has already."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.loaded: dict[str, Path] = {}

    def models(self) -> set[str]:
        return set(self.loaded)

    def load(self, name: str, folder: Path) -> None:
        if name in self.loaded:
            raise VllmRefused(f"{name} has already been loaded")
        self.loaded[name] = folder


def adapter(folder: Path, content: bytes = b"weights", names: tuple[str, ...] = (WEIGHTS,)) -> Path:
    """A whole adapter folder."""
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(content)
    file = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"format": FORMAT, "files": dict.fromkeys(names, file), "base_model": {}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_what_is_wanted_and_missing_is_loaded(tmp_path: Path) -> None:
    vllm = Loads()
    wanted = {name: adapter(tmp_path / name) for name in ("p@v1", "p@v2")}
    vllm.loaded = {"p@v1": wanted["p@v1"]}
    load_missing(vllm, wanted, vllm.models())
    assert vllm.loaded == wanted


def test_a_damaged_adapter_is_named_and_the_others_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vllm = Loads()
    wanted = {name: adapter(tmp_path / name) for name in ("p@v1", "p@v2")}
    (wanted["p@v1"] / "adapter_model.safetensors").write_bytes(b"weight?")
    load_missing(vllm, wanted, set())
    assert set(vllm.loaded) == {"p@v2"}
    (said,) = errors(caplog)
    assert "p@v1 cannot be loaded" in said and "SHA-256" in said


def test_an_adapter_that_somebody_else_has_loaded_meanwhile_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = Loads()
    wanted = {"p@v1": adapter(tmp_path / "p@v1")}
    vllm.load("p@v1", wanted["p@v1"])
    load_missing(vllm, wanted, set())
    assert errors(caplog) == []


def test_a_whole_adapter_is_known_by_its_manifests_hash(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "p@v1")
    assert verify(folder) == hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def test_a_folder_that_is_not_there_is_damage(tmp_path: Path) -> None:
    with pytest.raises(AdapterDamaged, match=MANIFEST):
        verify(tmp_path / "p@v1")


def test_only_the_optimizers_state_may_be_missing_and_what_is_there_must_be_right(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "p@v1", names=(WEIGHTS, OPTIMIZER_STATE))
    whole = verify(folder)
    (folder / OPTIMIZER_STATE).write_bytes(b"weight?")
    with pytest.raises(AdapterDamaged, match=OPTIMIZER_STATE):
        verify(folder)
    (folder / OPTIMIZER_STATE).unlink()
    assert verify(folder) == whole
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterDamaged, match=WEIGHTS):
        verify(folder)
