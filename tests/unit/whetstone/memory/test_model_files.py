"""A model's sizes are those of its files, and what is no model says so in one sentence."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.shapes import write
from whetstone.config.settings import STARTER
from whetstone.memory.model_files import ModelUnreadable, header, of_folder, read


def with_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_the_starters_sizes_are_those_of_its_weights() -> None:
    sizes = read(str(STARTER))
    assert sizes.parameters == sum(one.numbers for one in header(STARTER / "model.safetensors").values())
    assert sizes.item_bytes == 4 and sizes.weight_bytes == 4 * sizes.parameters
    file_bytes = (STARTER / "model.safetensors").stat().st_size
    assert 0 < file_bytes - sizes.weight_bytes < 10_000, "all but the header"
    assert (sizes.layers, sizes.hidden, sizes.query, sizes.longest) == (4, 128, 128, 2048)
    assert sizes.key_value_bytes == 4 * 2 * 2 * 32 * 4


def test_a_7b_is_what_its_card_says(tmp_path: Path) -> None:
    sizes = of_folder(write(tmp_path, "7B"))
    assert sizes.parameters == 7_615_616_512 and sizes.billions == "7.6B"  # of Qwen2.5-7B-Instruct on the hub
    assert sizes.key_value_bytes == 57_344  # 28 layers, 4 heads of 128, keys and values, 2 bytes
    assert 16 * sizes.lora_width == 40_370_176  # what peft calls trainable at rank 16


def test_a_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    folder = write(tmp_path, "0.5B")
    sizes = of_folder(folder)
    assert sizes.parameters == 494_032_768
    assert of_folder(with_config(folder, tie_word_embeddings=False)) == sizes


def test_a_models_text_part_may_be_a_section_of_its_config(tmp_path: Path) -> None:
    folder = write(tmp_path, "0.5B")
    sizes = of_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": config}))
    assert of_folder(folder) == sizes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised"),
        ({"hidden_size": None}, "is not that of a language model"),
        ({"num_attention_heads": 0}, "is not that of a language model"),
    ],
)
def test_a_config_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelUnreadable, match=why):
        of_folder(with_config(write(tmp_path, "0.5B"), **changes))


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**40), struct.pack("<Q", 4) + b"nope"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path, "0.5B")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelUnreadable, match="no safetensors file"):
        of_folder(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match=r"config\.json cannot be read"):
        read(str(tmp_path))
    (write(tmp_path, "0.5B") / "model.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match=r"no \*\.safetensors"):
        read(str(tmp_path / "Qwen2.5-0.5B-Instruct"))


def test_a_model_of_the_hub_is_read_from_its_cache_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    snapshot = tmp_path / "models--Qwen--Qwen2.5-7B-Instruct" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    write(tmp_path, "7B").rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert (sizes := read("Qwen/Qwen2.5-7B-Instruct")).name == "Qwen/Qwen2.5-7B-Instruct"
    assert sizes.billions == "7.6B"
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))  # of which one is not here yet
    with pytest.raises(ModelUnreadable, match="cannot be had from the hub"):
        read("Qwen/Qwen2.5-7B-Instruct")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnreadable, match=r"Qwen/none: its files cannot be had from the hub .*set HF_TOKEN") as one:
        read("Qwen/none")
    assert "\n" not in str(one.value)
    with pytest.raises(ModelUnreadable, match="no folder here and no name of the hub"):
        read("not a name/of/anything")
