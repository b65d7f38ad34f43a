"""An adapter taken out with `whetstone versions export` and brought in again; files as the trainer writes them."""

import shutil
from pathlib import Path

import pytest
from sqlalchemy import update

from migrations import schema
from tests.unit.whetstone.cli.tables.test_version_commands import Here, here
from trainer.adapters import files
from trainer.learner.learner import Learner
from whetstone.config.settings import STARTER
from whetstone.config.trainer import TrainerSettings
from whetstone.registry import adapters

__all__ = ["here"]


@pytest.fixture
def written(here: Here) -> Here:
    """Version 1 is as a step writes it."""
    folder = here.data / "adapters" / "starter@v1"
    shutil.rmtree(folder)
    learner = Learner.fresh(STARTER, TrainerSettings(threads=1, device="cpu"), seed=1)
    manifest_sha256 = files.write(folder, learner, parent=0, step=1)
    v = schema.policy_versions
    with here.engine.begin() as connection:
        connection.execute(update(v).where(v.c.id == "starter@v1").values(manifest_sha256=manifest_sha256))
    return here


@pytest.mark.slow
def test_what_was_taken_out_comes_in_again_as_a_version_of_its_own(written: Here, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert written.run("versions", "export", "starter@v1", str(out)).exit_code == 0
    result = written.run("versions", "import", str(out), "starter")
    assert result.exit_code == 0, result.output
    assert result.stdout == "it is version 4 of starter; `whetstone versions promote starter 4` lets it answer\n"
    row = written.row("starter@v4")
    assert (row.state, row.parent, row.origin) == ("retired", 0, str(out))
    assert adapters.verify(Path(row.adapter_path)) == row.manifest_sha256
    same = [Path(one.adapter_path) / "adapter_model.safetensors" for one in (row, written.row("starter@v1"))]
    assert same[0].read_bytes() == same[1].read_bytes()


@pytest.mark.long(part="stacks")
@pytest.mark.slow
def test_an_adapter_whose_weights_are_missing_is_refused_with_the_remedy(written: Here, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert written.run("versions", "export", "starter@v1", str(out)).exit_code == 0
    (out / "adapter_model.safetensors").unlink()
    assert "safe_serialization" in written.refused("versions", "import", str(out), "starter")


@pytest.mark.long(part="stacks")
@pytest.mark.slow
def test_a_merged_export_is_a_model_that_needs_no_adapter(written: Here, tmp_path: Path) -> None:
    out = tmp_path / "merged"
    result = written.run("versions", "export", "starter@v1", str(out), "--merged")
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert "is there already" in written.refused("versions", "export", "starter@v1", str(out), "--merged")
    shutil.rmtree(out)
    (written.data / "adapters" / "starter@v1" / "rng.safetensors").unlink()
    assert "rng.safetensors" in written.refused("versions", "export", "starter@v1", str(out), "--merged")
    assert not out.exists()
