"""Unsloth's backend: what needs no Unsloth, and its kernels, interpreted in an environment of their own."""

import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.domain.rows import Row
from trainer.errors import ModelUnusable
from trainer.learner import unsloth
from trainer.learner.learner import Learner
from whetstone.config.settings import STARTER
from whetstone.config.trainer import TrainerSettings

ROOT = Path(__file__).resolve().parents[4]
PYTHON = ROOT / ".venv-unsloth" / "bin" / "python"
PROGRAM = Path(__file__).with_name("unsloth_interpreted.py")
SETTINGS = TrainerSettings(
    threads=1, device="cpu", learning_rate=1e-3, max_row_tokens=128, micro_batch_tokens=128, trees=False, clip_norm=1e9
)
VOCABULARY = 64


def rows(seed: int) -> list[Row]:
    """Four rows of 20 to 30 tokens, half of them sampled."""
    rng = random.Random(seed)
    made = []
    for place in range(4):
        sampled = [at > 3 and rng.random() < 0.5 for at in range(rng.randint(20, 30))] + [True]
        advantage = rng.uniform(-1, 1)
        made.append(
            Row(
                trajectory_id=str(place),
                token_ids_T=tuple(rng.randrange(VOCABULARY) for _ in sampled),
                sampled_T=tuple(sampled),
                inference_logprobs_T=tuple(rng.uniform(-6, -4) if here else math.nan for here in sampled),
                versions_T=tuple(0 if here else -1 for here in sampled),
                temperatures_T=(1.0,) * len(sampled),
                advantages_T=tuple(advantage if here else 0.0 for here in sampled),
            )
        )
    return made


def stepped(model: Path, settings: TrainerSettings, seed: int) -> Learner:
    """A learner after one step."""
    learner = Learner.fresh(model, settings, seed)
    learner.step(rows(seed), 0)
    return learner


def gradient(optimizer: bytes) -> torch.Tensor:
    """The gradient of a first step: AdamW's first moment is a tenth of it."""
    moments = safetensors.torch.load(optimizer)
    names = sorted(name for name in moments if name.startswith("exp_avg."))
    return torch.cat([moments[name].flatten().double() for name in names])


@pytest.mark.parametrize(
    ("row", "batch", "positions", "longest"),
    [(8192, 8192, 2048, 2048), (512, 1024, 2048, 1024), (4096, 512, 4096, 4096)],
)
def test_a_model_is_never_asked_for_more_than_its_own_positions(
    row: int, batch: int, positions: int, longest: int
) -> None:
    settings = TrainerSettings(max_row_tokens=row, micro_batch_tokens=batch)
    assert unsloth.max_seq_length(settings, positions) == longest


def test_without_cuda_it_is_refused_with_the_way_out(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unsloth.CPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelUnusable, match=r"computes on CUDA, not on cpu: set it to hf .*UNSLOTH_FORCE_CPU=1"):
        unsloth.load(tiny_model, SETTINGS, torch.device("cpu"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """Folders of a random Llama in two precisions, of SmolLM2's layers in small."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    parent, folders = tmp_path_factory.mktemp("llama"), {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    for dtype in (torch.float32, torch.float16):
        folders[dtype] = parent / str(dtype)
        model.to(dtype).save_pretrained(folders[dtype])
        for name in ("tokenizer.json", "tokenizer_config.json"):  # Unsloth loads it too
            shutil.copyfile(STARTER / name, folders[dtype] / name)
    return folders


@pytest.mark.slow
@pytest.mark.long(part="unsloth")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-9), (torch.float16, 1e-4)])
def test_its_kernels_give_the_gradient_of_the_other_backend(
    llama: dict[torch.dtype, Path], tmp_path: Path, dtype: torch.dtype, off: float
) -> None:
    target = tmp_path / "optimizer.safetensors"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "compiled")}
    command = [str(PYTHON), "-W", "ignore", str(PROGRAM), str(llama[dtype]), "3", str(target)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100)
    assert run.returncode == 0, run.stdout + run.stderr
    # Its fused LoRA kernels are for half precision alone.
    fused = 0 if dtype == torch.float32 else 2
    assert f"with {fused} QKV layers, {fused} O layers and {fused} MLP layers" in run.stdout + run.stderr
    theirs = gradient(target.read_bytes())
    # In half precision the reference still computes in fp32: what differs is Unsloth's rounding.
    ours = gradient(stepped(llama[torch.float32], SETTINGS, 3).files()["optimizer.safetensors"])
    assert 1 - torch.nn.functional.cosine_similarity(ours, theirs, dim=0).item() <= off
    assert 0.99 < (theirs.norm() / ours.norm()).item() < 1.01
