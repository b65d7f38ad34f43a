"""An adapter that peft wrote, made ours: it says what it said there, and a step can go on from it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer import adopt as program
from trainer.adapters import files as adapter
from trainer.domain.rows import Row
from trainer.errors import AdapterMismatch
from trainer.learner.imported_lora import adopt
from trainer.learner.learner import Learner
from whetstone.config.settings import Settings, as_environment
from whetstone.config.trainer import TrainerSettings
from whetstone.registry import adapters

SETTINGS = TrainerSettings(threads=1, device="cpu", lora_rank=4, lora_alpha=8)
PROMPT, SAID = [1, 5, 9, 12], [7, 3, 22]

Peft = Callable[..., Path]


@pytest.fixture
def peft_folder(tiny_model: Path, tmp_path: Path) -> Peft:
    """Writes one as peft's users do."""

    def write(model: Path = tiny_model, **values: Any) -> Path:
        config = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}
        with torch.random.fork_rng():
            torch.manual_seed(3)
            loaded = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**(config | values)))
            for name, weight in loaded.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.2)
        folder = tmp_path / "elsewhere"
        loaded.save_pretrained(folder)
        with torch.no_grad():
            logits_TV = loaded(input_ids=torch.tensor([PROMPT + SAID])).logits[0].log_softmax(-1)
        places = range(len(PROMPT) - 1, len(PROMPT) + len(SAID) - 1)
        said = [logits_TV[place, token].item() for place, token in zip(places, SAID, strict=True)]
        (folder / "said.json").write_text(json.dumps(said))
        return folder

    return write


def test_it_says_what_it_said_there(tiny_model: Path, peft_folder: Peft) -> None:
    for values in ({}, {"use_rslora": True}, {"target_modules": "all-linear", "r": 2}):
        folder = peft_folder(**values)
        learner = adopt(tiny_model, folder, SETTINGS, seed=0, max_rank=8)
        assert learner.logprobs(PROMPT, SAID) == pytest.approx(json.loads((folder / "said.json").read_text()), abs=1e-4)


def test_one_process_reads_it_where_steps_share_a_base(tiny_model: Path, peft_folder: Peft) -> None:
    shared = TrainerSettings(**{**SETTINGS.model_dump(), "sharding": "fsdp", "processes": 2})
    learner = adopt(tiny_model, peft_folder(), shared, seed=0, max_rank=8)
    assert len(learner.logprobs(PROMPT, PROMPT)) == len(PROMPT)


def test_the_next_step_goes_on_from_it_with_a_fresh_optimizer(
    tiny_model: Path, peft_folder: Peft, make_rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    source = peft_folder()
    ours = tmp_path / "adapters" / "p@v1"
    adapter.write(ours, adopt(tiny_model, source, SETTINGS, seed=0, max_rank=8), parent=0, step=0)
    adapters.verify(ours)
    before = safetensors.torch.load_file(ours / "adapter_model.safetensors")
    assert before.keys() == safetensors.torch.load_file(source / "adapter_model.safetensors").keys()
    learner = Learner.resume(tiny_model, ours, SETTINGS)
    assert learner.step(make_rows(4), 1).grad_norm > 0
    files = learner.files()
    assert any(
        (safetensors.torch.load(files["adapter_model.safetensors"])[name] != before[name]).any() for name in before
    )
    state = safetensors.torch.load(files["optimizer.safetensors"])
    assert {value.item() for name, value in state.items() if name.startswith("step.")} == {1.0}


def changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "it uses use_dora, which vLLM does not serve"),
        ({"modules_to_save": ["lm_head"]}, "it uses modules_to_save"),
        ({"bias": "all"}, "it trains biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base model"),
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING, not LORA"),
        ({"target_modules": ["q_proj"]}, "not the layers of"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"r": 0}, "takes no LoRA"),
        ({"r": 8}, r"lora_A.* is \[4, 64\], .* has \[8, 64\] there"),
    ],
)
def test_what_is_no_plain_lora_of_this_model_is_refused(
    tiny_model: Path, peft_folder: Peft, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message) as refused:
        adopt(tiny_model, changed(peft_folder(), **values), SETTINGS, seed=0, max_rank=8)
    assert refused.type.__module__ == "trainer.errors"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": 10_000_000}, "rank 10000000; vLLM is started with --max-lora-rank 8"),
        ({"rank_pattern": {"q_proj": 10**30}}, "rank 1000000000000000000000000000000; vLLM"),
        ({"r": "10000000"}, "ranks that are no integers"),
        ({"r": 1e7}, "ranks that are no integers"),
        ({"rank_pattern": None}, "ranks that are no integers"),
    ],
)
def test_a_rank_is_looked_at_before_matrices_are_made_of_it(
    tiny_model: Path, peft_folder: Peft, values: dict[str, Any], message: str
) -> None:
    folder = changed(peft_folder(), **values)
    (folder / "adapter_model.safetensors").write_bytes(b"")  # 0 bytes may claim any rank
    with pytest.raises(Exception, match=message) as refused:
        adopt(tiny_model, folder, SETTINGS, seed=0, max_rank=8)
    assert refused.type.__module__ == "trainer.errors"


def test_pickled_and_damaged_weights_are_not_read(tiny_model: Path, peft_folder: Peft) -> None:
    folder = peft_folder()
    weights = folder / "adapter_model.safetensors"
    named = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({name: weight * torch.nan for name, weight in named.items()}, weights)
    with pytest.raises(AdapterMismatch, match="has numbers that are not finite"):
        adopt(tiny_model, folder, SETTINGS, seed=0, max_rank=8)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AdapterMismatch, match="adapter_model.safetensors"):
        adopt(tiny_model, folder, SETTINGS, seed=0, max_rank=8)
    weights.unlink()
    torch.save(named, folder / "adapter_model.bin")
    with pytest.raises(AdapterMismatch, match="save the adapter with safe_serialization=True"):
        adopt(tiny_model, folder, SETTINGS, seed=0, max_rank=8)


def configured(monkeypatch: pytest.MonkeyPatch, model: Path, **trainer: Any) -> None:
    """The settings that the program finds."""
    settings = Settings(model=str(model), trainer=TrainerSettings(threads=1, **trainer))
    for name, value in as_environment(settings).items():
        monkeypatch.setenv(name, value)


def test_it_is_told_what_was_written_and_whether_a_step_can_go_on_from_it(
    tiny_model: Path, peft_folder: Peft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = peft_folder(rank_pattern={"layers.0.self_attn.q_proj": 6})
    configured(monkeypatch, tiny_model, lora_rank=4, lora_alpha=8)
    written = program.adopt(source, tmp_path / "p@v1")
    assert written == program.AdoptionResult(adapters.verify(tmp_path / "p@v1"), rank=6, why_no_step=None)
    configured(monkeypatch, tiny_model, lora_rank=16)
    assert program.adopt(source, tmp_path / "p@v2").why_no_step == (
        "its rank is 4 and its alpha 8, trainer.lora_rank and trainer.lora_alpha are 16 and 32"
    )
    configured(monkeypatch, tiny_model, lora_rank=1)
    with pytest.raises(AdapterMismatch, match="rank 6; vLLM is started with --max-lora-rank 1"):
        program.adopt(source, tmp_path / "p@v3")
    assert not (tmp_path / "p@v3").exists()


@pytest.mark.slow
@pytest.mark.long(part="stacks")
def test_the_program_ends_with_2_and_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.adopt", str(tmp_path), str(tmp_path / "p@v1")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "adapter_config.json cannot be read as peft writes it" in ended.stderr and "Traceback" not in ended.stderr
