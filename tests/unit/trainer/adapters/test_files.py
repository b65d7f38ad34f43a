import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.adapters import files as adapter
from trainer.domain.base import BaseModel
from trainer.errors import AdapterExists, AdapterNotWritten
from whetstone.registry.adapters import AdapterDamaged, verify

ROOT = Path(__file__).parents[4]
BASE = BaseModel("tiny", "c" * 64, "w" * 64, None)


class Learned:
    """Anything with files and a base can be written."""

    base = BASE

    def files(self) -> Mapping[str, bytes]:
        return {"adapter_model.safetensors": b"weights", "adapter_config.json": b"{}", "rng.safetensors": b""}


def test_a_written_adapter_is_whole_and_its_manifest_tells_all(tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "p@v1"
    sha256 = adapter.write(folder, Learned(), parent=0, step=7)
    content = (folder / "manifest.json").read_bytes()
    assert sha256 == hashlib.sha256(content).hexdigest() == verify(folder)
    manifest = json.loads(content)
    assert (manifest["format"], manifest["parent"], manifest["step"]) == (1, 0, 7)
    assert manifest["base_model"] == {
        "name": "tiny",
        "config_sha256": "c" * 64,
        "weights_sha256": "w" * 64,
        "tokenizer_sha256": None,
    }
    assert manifest["files"]["adapter_model.safetensors"] == {
        "bytes": 7,
        "sha256": hashlib.sha256(b"weights").hexdigest(),
    }
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "manifest.json"}
    assert list(folder.parent.iterdir()) == [folder]


def test_an_adapter_is_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "p@v1"
    folder.mkdir()
    with pytest.raises(AdapterExists, match="never overwritten"):
        adapter.write(folder, Learned(), parent=0, step=1)
    assert list(folder.iterdir()) == []


def test_the_second_of_two_writers_loses_and_leaves_the_first_alone(tmp_path: Path) -> None:
    folder = tmp_path / "p@v1"

    class Slow(Learned):
        def files(self) -> Mapping[str, bytes]:
            adapter.write(folder, Learned(), parent=0, step=1)
            return {"late": b""}

    with pytest.raises(AdapterExists):
        adapter.write(folder, Slow(), parent=0, step=1)
    verify(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_parent_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "adapters").write_text("a file")
    with pytest.raises(AdapterNotWritten, match="nothing was left there"):
        adapter.write(tmp_path / "adapters" / "p@v1", Learned(), parent=0, step=1)


WRITER = """
import resource, signal, sys
from pathlib import Path
from trainer.adapters import files as adapter
from trainer.domain.base import BaseModel
from trainer.errors import AdapterNotWritten

class Learned:
    base = BaseModel("tiny", "c", "w", None)
    def files(self):
        return {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x" * 10_000}

signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
try:
    adapter.write(Path(sys.argv[1]), Learned(), parent=0, step=1)
except AdapterNotWritten as error:
    print(error)
"""


def write_beyond_the_limit(folder: Path, at_the_limit: str) -> subprocess.CompletedProcess[str]:
    """A writer of 10,000 bytes that may write 5,000. `at_the_limit`: SIG_IGN makes it an error, SIG_DFL death."""
    return subprocess.run(
        [sys.executable, "-c", WRITER, str(folder), at_the_limit], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_disk_that_refuses_leaves_nothing_under_any_name(tmp_path: Path) -> None:
    done = write_beyond_the_limit(tmp_path / "p@v1", "SIG_IGN")
    assert "File too large; nothing was left there" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_writer_killed_half_way_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    folder = tmp_path / "p@v1"
    done = write_beyond_the_limit(folder, "SIG_DFL")
    assert done.returncode == -signal.SIGXFSZ
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".tmp-p@v1-")

    adapter.write(folder, Learned(), parent=0, step=1)
    verify(folder)
    assert adapter.sweep(tmp_path) == []
    hours_ago = time.time() - 2 * 3600
    os.utime(leftover, (hours_ago, hours_ago))
    os.utime(folder, (hours_ago, hours_ago))
    assert adapter.sweep(tmp_path) == [leftover]
    assert list(tmp_path.iterdir()) == [folder]


def test_sweeping_a_folder_that_is_not_there_finds_nothing(tmp_path: Path) -> None:
    assert adapter.sweep(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["gone", "cut", "flipped"])
def test_damage_is_named(tmp_path: Path, name: str, harm: str) -> None:
    folder = tmp_path / "p@v1"
    adapter.write(folder, Learned(), parent=0, step=1)
    path = folder / name
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-2] if harm == "cut" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(AdapterDamaged, match=name):
        verify(folder)


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ("[]", "not a manifest of ours"),
        ('{"format": 2}', "format 2, this version reads 1"),
        ('{"format": 1}', "not a manifest of ours"),
        ('{"format": 1, "base_model": {}, "files": {"../x": {"bytes": 1, "sha256": ""}}}', "no entry of ours"),
        ('{"format": 1, "base_model": null, "files": {}}', "base_model is no object"),
    ],
)
def test_a_manifest_of_somebody_else_is_refused(tmp_path: Path, manifest: str, says: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(AdapterDamaged, match=says):
        verify(tmp_path)
