"""Weights with the adapter in them say what base and adapter say together."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.adapters import files
from trainer.domain.rows import Row
from trainer.errors import AdapterExists, AdapterMismatch, ModelUnusable
from trainer.learner.learner import Learner
from trainer.merge import main, merge
from whetstone.config.trainer import TrainerSettings
from whetstone.registry.adapters import AdapterDamaged

IDS_BT = torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33]])


@pytest.fixture(scope="module")
def learned(tiny_model: Path, make_rows: Callable[..., list[Row]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter's folder after two steps."""
    learner = Learner.fresh(tiny_model, TrainerSettings(learning_rate=0.05, device="cpu"), seed=0)
    for version in range(2):
        learner.step(make_rows(6, seed=version), version)
    folder = tmp_path_factory.mktemp("adapters") / "starter@v2"
    files.write(folder, learner, parent=1, step=2)
    return folder


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS_BT).logits


def base(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def test_merged_weights_say_what_the_adapter_says(tiny_model: Path, learned: Path, tmp_path: Path) -> None:
    merge(learned, str(tiny_model), tmp_path / "merged")
    alone = logits(base(tmp_path / "merged"))
    both = logits(PeftModel.from_pretrained(base(tiny_model), str(learned)))
    assert alone.dtype == torch.float32
    assert torch.allclose(alone, both, rtol=0, atol=1e-5)
    assert not torch.allclose(alone, logits(base(tiny_model)), rtol=0, atol=0.1)


def test_the_folder_has_all_that_the_base_models_has_and_nothing_of_the_adapter(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "base"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "README.md").write_text("# Base")
    (model / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "merged").mkdir()
    learner = Learner.fresh(model, TrainerSettings(device="cpu"), seed=0)
    files.write(tmp_path / "starter@v1", learner, parent=0, step=1)
    merge(tmp_path / "starter@v1", str(model), tmp_path / "merged")
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"}
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_base_model_keeps_its_precision(tiny_model: Path, tmp_path: Path) -> None:
    base(tiny_model).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    learner = Learner.fresh(tmp_path / "half", TrainerSettings(device="cpu"), seed=0)
    files.write(tmp_path / "starter@v1", learner, parent=0, step=1)
    merge(tmp_path / "starter@v1", str(tmp_path / "half"), tmp_path / "merged")
    assert logits(base(tmp_path / "merged")).dtype == torch.bfloat16


def test_what_is_in_a_folder_is_left_alone(tiny_model: Path, learned: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("notes")
    with pytest.raises(AdapterExists, match="there already"):
        merge(learned, str(tiny_model), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_damaged_adapter_is_not_merged(tiny_model: Path, learned: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "starter@v2"
    shutil.copytree(learned, damaged)
    weights = damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(AdapterDamaged, match="adapter_model"):
        merge(damaged, str(tiny_model), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_base_model_is_refused(tiny_model: Path, learned: Path, tmp_path: Path) -> None:
    other = base(tiny_model)
    other.get_parameter("model.norm.weight").data[0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterMismatch, match="weights_sha256"):
        merge(learned, str(tmp_path / "other"), tmp_path / "merged")
    with pytest.raises(ModelUnusable):
        merge(learned, str(tmp_path / "nowhere"), tmp_path / "merged")


def test_the_command_line_merges_and_says_why_not(
    tiny_model: Path,
    learned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    merged = tmp_path / "merged"
    monkeypatch.setattr(sys, "argv", ["merge", str(learned), str(tiny_model), str(merged)])
    main()
    assert (merged / "model.safetensors").is_file()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{merged}: there already; name a folder that is new or empty\n"
