"""The formulas of a step's memory are within 15 % of what real steps on a CPU, and traces of large shapes, allocate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.memory.measured import SETTINGS, of_step, of_trace
from benchmarks.memory.shapes import QWEN, Shape

TOLERANCE = 0.15
SMALL = Shape(256, 1024, 4, 8, 2, 4096, True)
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


def saved(folder: Path, kind: Any, config: PreTrainedConfig, dtype: torch.dtype) -> Path:
    """A model with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(config).to(dtype).save_pretrained(folder)
    return folder


def assert_close(one: Any) -> None:
    assert abs(one.ratio - 1) <= TOLERANCE, f"{one.what}: counted {one.counted}, planned {one.planned}"


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [
        pytest.param(torch.bfloat16, True, id="bf16"),
        pytest.param(torch.float32, False, id="fp32-all"),
        pytest.param(torch.float32, True, id="fp32", marks=pytest.mark.long(part="exact")),
        pytest.param(torch.bfloat16, False, id="bf16-all", marks=pytest.mark.long(part="exact")),
    ],
)
def test_a_small_models_step_takes_what_is_planned(tmp_path: Path, dtype: torch.dtype, checkpointing: bool) -> None:
    folder = saved(tmp_path, Qwen2ForCausalLM, Qwen2Config(**SMALL.config()), dtype)
    settings = SETTINGS.model_copy(update={"gradient_checkpointing": checkpointing})
    assert_close(of_step(folder, 1024, settings))


def test_a_trace_takes_what_is_planned() -> None:
    assert_close(of_trace("small", SMALL, 4096))


@pytest.mark.long(part="exact")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", QWEN)
def test_a_trace_of_a_large_shape_takes_what_is_planned(size: str) -> None:
    assert_close(of_trace(size, QWEN[size], 8192))


@pytest.mark.long(part="exact")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_step_of_135m_takes_what_is_planned(tmp_path: Path, tokens: int) -> None:
    assert_close(of_step(saved(tmp_path, LlamaForCausalLM, SMOLLM2, torch.bfloat16), tokens))


@pytest.mark.long(part="exact")
@pytest.mark.timeout(1800)
def test_a_step_of_half_a_billion_takes_what_is_planned(tmp_path: Path) -> None:
    config = Qwen2Config(**QWEN["0.5B"].config())
    assert_close(of_step(saved(tmp_path, Qwen2ForCausalLM, config, torch.bfloat16), 512))
