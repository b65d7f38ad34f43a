"""On CUDA, the same: `make test-gpu`. Left out of every other run; without CUDA it fails rather than passes by."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.adapters import files
from trainer.domain.rows import Row
from trainer.learner.chunked_head import token_logprobs
from trainer.learner.gradient import memory
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

pytestmark = pytest.mark.gpu

MakeRows = Callable[..., list[Row]]
CPU = TrainerSettings(threads=1, device="cpu", clip_norm=1e9)
"""Nothing is clipped, so the optimizer's first moment after one step is the gradient times 0.1."""
CUDA = CPU.model_copy(update={"device": "cuda"})


@pytest.fixture
def family(make_rows: MakeRows) -> list[Row]:
    """Rows of which three begin alike, for 200 tokens."""
    (long,) = make_rows(1, seed=8, shortest=240, longest=240)
    ends = make_rows(2, seed=9, shortest=40, longest=40)
    forked = [_joined(long, 200, end) for end in ends]
    return [long, *forked, *make_rows(4)]


def _joined(one: Row, length: int, other: Row) -> Row:
    """What `one` begins with, then `other`."""
    fields = ("token_ids_T", "sampled_T", "inference_logprobs_T", "versions_T", "temperatures_T", "advantages_T")
    joined = {name: getattr(one, name)[:length] + getattr(other, name) for name in fields}
    return Row(trajectory_id=other.trajectory_id, **joined)


def gradient(model: Path, rows: list[Row], settings: TrainerSettings) -> Tensor:
    """All of the gradient of a learner whose LoRA is not zero any more, as one vector on the CPU."""
    learner = Learner.fresh(model, settings, seed=1)
    for weight in learner._trained.values():
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
        weight.data.copy_(0.05 * drawn)
    learner.step(rows, 0)
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    return torch.cat([state[name].flatten() / 0.1 for name in sorted(state) if name.startswith("exp_avg.")])


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0).item()


def test_in_fp32_the_gradient_is_that_of_the_cpu(tiny_model: Path, family: list[Row]) -> None:
    one, other = gradient(tiny_model, family, CPU), gradient(tiny_model, family, CUDA)
    assert (one - other).abs().max() <= 1e-4


@pytest.mark.parametrize("attention", ["segments", "dense", "flex"])
def test_every_way_of_reading_forests_gives_the_gradient_of_rows_alone(
    tiny_model: Path, family: list[Row], attention: str
) -> None:
    alone = gradient(tiny_model, family, CUDA.model_copy(update={"trees": False, "micro_batch_tokens": 64}))
    settings = CUDA.model_copy(update={"attention": attention})
    assert Learner.fresh(tiny_model, settings, seed=1)._reading.trees
    assert (alone - gradient(tiny_model, family, settings)).abs().max() <= 1e-4


@pytest.mark.parametrize("trees", [True, False])
def test_in_bf16_the_gradient_points_the_same_way(
    tmp_path: Path, tiny_model: Path, family: list[Row], trees: bool
) -> None:
    low = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(low)
    exact = gradient(tiny_model, family, CPU)
    assert cosine(exact, gradient(low, family, CUDA.model_copy(update={"trees": trees}))) > 0.99


def test_an_adapter_of_the_cpu_goes_on_on_cuda(tmp_path: Path, tiny_model: Path, family: list[Row]) -> None:
    first = Learner.fresh(tiny_model, CPU, seed=3)
    first.step(family, 0)
    files.write(tmp_path / "p@v1", first, parent=0, step=1)
    second = Learner.resume(tiny_model, tmp_path / "p@v1", CUDA)
    assert second.step(family, 1).loss == pytest.approx(first.step(family, 1).loss, abs=1e-4)


def test_a_head_in_bf16_computes_in_fp32_without_a_copy() -> None:
    """Logits, and the gradient that takes two products of 16 bits, against the same head widened to fp64."""
    generator = torch.Generator().manual_seed(0)
    low = torch.nn.Linear(896, 151_936, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    low.weight.copy_(torch.randn(low.weight.shape, generator=generator) / 30)
    states_SH = torch.randn(40, 896, generator=generator).bfloat16()
    token_ids_S, temperatures_S = torch.arange(40) * 3000, torch.ones(40)
    results = []
    for head, device in ((deepcopy(low).to("cuda"), "cuda"), (low.double(), "cpu")):
        hidden_SH = states_SH.to(device, head.weight.dtype).detach().requires_grad_()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        logprobs_S, entropies_S = token_logprobs(hidden_SH, head, token_ids_S.to(device), temperatures_S.to(device))
        (logprobs_S.sum() + 0.1 * entropies_S.sum()).backward()
        if device == "cuda":
            assert torch.cuda.max_memory_allocated() - before < head.weight.numel() * 2
        results.append([one.detach().double().cpu() for one in (logprobs_S, entropies_S, hidden_SH.grad)])
    for ours, theirs, tolerance in zip(*results, (1e-4, 1e-4, 2**-8), strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


def test_memory_that_runs_out_costs_a_micro_batch_and_not_the_step(tiny_model: Path, make_rows: MakeRows) -> None:
    memory.budget_of.cache_clear()
    settings = CUDA.model_copy(update={"gradient_checkpointing": False, "probe_memory": False})
    rows = make_rows(40, shortest=180, longest=200)
    undisturbed, disturbed = (Learner.fresh(tiny_model, settings, seed=1) for _ in range(2))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    undisturbed.step(rows, 0)
    needed = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 0.6 * needed) / whole)
    try:
        disturbed.step(rows, 0)
        assert memory.budget_of(disturbed.base, settings).has_fallen
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        memory.budget_of.cache_clear()
    ours, theirs = (safetensors.torch.load(one.files()["optimizer.safetensors"]) for one in (disturbed, undisturbed))
    assert max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours) <= 1e-5
