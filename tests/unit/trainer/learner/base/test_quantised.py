"""A base in 4 or 8 bits: the same steps, nearly the same gradient, shared and moved as any other base.

What needs bitsandbytes runs in an environment of its own: `make test-all PART=quantised`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import linear

from trainer.domain.rows import Row
from trainer.errors import ModelUnusable
from trainer.learner.base.quantised import Int8Linear, Nf4Linear, QuantisedLinear, base_parameters
from trainer.learner.learner import ADAPTER_WEIGHTS, Learner
from whetstone.config.settings import STARTER
from whetstone.config.trainer import Quantisation, TrainerSettings
from whetstone.memory import model_files
from whetstone.memory.training import base_bytes
from whetstone.registry.adapters import OPTIMIZER_STATE

with_bitsandbytes = pytest.mark.long(part="quantised")
MakeRows = Callable[..., list[Row]]
WAYS: tuple[Quantisation, ...] = ("nf4", "int8")
COSINE = {"nf4": 0.8, "int8": 0.99}
"""Least cosine of the tiny model's gradient to that in fp32. Measured: 0.87 and 0.998; random weights are the worst."""


def settings(quantisation: Quantisation = "none", **others: Any) -> TrainerSettings:
    return TrainerSettings(threads=1, device="cpu", quantisation=quantisation, clip_norm=1e9, **others)


def layer_of_bitsandbytes(kind: Quantisation, weight: Tensor, bias: Tensor) -> torch.nn.Linear:
    """A layer as transformers leaves it after loading."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

    outputs, inputs = weight.shape
    layer: torch.nn.Linear
    if kind == "nf4":
        layer = Linear4bit(inputs, outputs, quant_type="nf4")
        layer.weight = Params4bit(weight, quant_type="nf4").to("cpu")
    else:
        layer = Linear8bitLt(inputs, outputs, has_fp16_weights=False)
        layer.weight = Int8Params(weight, requires_grad=False).to("cpu")
    layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


def widened_by_bitsandbytes(weight: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from bitsandbytes.nn import Params4bit

    if isinstance(weight, Params4bit):
        return dequantize_4bit(weight.data, weight.quant_state).float()
    return int8_vectorwise_dequant(weight.data, weight.SCB)


@with_bitsandbytes
@pytest.mark.parametrize(("kind", "own"), [("nf4", Nf4Linear), ("int8", Int8Linear)])
def test_a_layer_multiplies_with_what_bitsandbytes_makes_of_its_weight(
    kind: Quantisation, own: type[QuantisedLinear]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((192, 320), (192,), (2, 5, 320)))
    theirs = layer_of_bitsandbytes(kind, weight, bias)
    wide = widened_by_bitsandbytes(theirs.weight)
    assert 0 < (wide - weight).norm() / weight.norm() < 0.1
    ours = own(theirs)
    torch.testing.assert_close(ours.widened(torch.float32), wide, rtol=0, atol=1e-6)
    x.requires_grad_(True)
    y = ours(x)
    (by_x,) = torch.autograd.grad(y.square().sum(), x)
    reference = linear(x, wide, bias)
    (expected,) = torch.autograd.grad(reference.square().sum(), x)
    torch.testing.assert_close(y, reference)
    torch.testing.assert_close(by_x, expected, rtol=1e-4, atol=1e-3)


def gradient(learner: Learner, rows: list[Row]) -> Tensor:
    """The gradient of a first step: ten times the first moment of AdamW."""
    learner.step(rows, 0)
    moments = safetensors.torch.load(learner.files()[OPTIMIZER_STATE])
    return torch.cat([moments[name].flatten() for name in sorted(moments) if name.startswith("exp_avg.")])


@with_bitsandbytes
@pytest.mark.parametrize("kind", WAYS)
def test_a_steps_gradient_is_nearly_that_of_the_whole_base(
    tiny_model: Path, make_rows: MakeRows, tmp_path: Path, kind: Quantisation
) -> None:
    rows = make_rows(6)
    moved = Learner.fresh(tiny_model, settings(learning_rate=1e-2), seed=1)
    moved.step(rows, 0)  # so that both halves of a LoRA have a gradient
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(moved.files()[ADAPTER_WEIGHTS])
    exact, quantised = (Learner.fresh(tiny_model, settings(way), seed=1) for way in ("none", kind))
    for learner in (exact, quantised):
        learner._load_weights(tmp_path)
    one, other = gradient(exact, rows), gradient(quantised, rows)
    assert COSINE[kind] < torch.nn.functional.cosine_similarity(one, other, dim=0) < 1
    assert all(weight.dtype == torch.float32 for weight in quantised._trained.values())
    assert quantised._reading.trees, "rows are read as trees"
    assert quantised.learning_rate == exact.learning_rate


@with_bitsandbytes
@pytest.mark.parametrize("kind", WAYS)
def test_two_policies_share_one_base_that_may_leave_the_device(
    tiny_model: Path, make_rows: MakeRows, kind: Quantisation
) -> None:
    stays = Learner.fresh(tiny_model, settings(kind), seed=1)
    expected = [stays.step(make_rows(4, seed), 0) for seed in range(2)], stays.files()
    leaves = settings(kind, offload=True)
    first, second = (Learner.fresh(tiny_model, leaves, seed=1) for _ in range(2))
    for learner in (first, second):
        figures = [learner.step(make_rows(4, seed), 0) for seed in range(2)]
        assert (figures, learner.files()) == expected
        assert learner.logprobs([1, 2, 3], [4, 5]) == stays.logprobs([1, 2, 3], [4, 5])
    frozen = [
        {one.data_ptr() for one in learner._model.parameters() if not one.requires_grad} for learner in (first, second)
    ]
    assert frozen[0] == frozen[1]


@with_bitsandbytes
@pytest.mark.parametrize("kind", WAYS)
def test_the_base_takes_what_is_planned_and_counts_as_whole(kind: Quantisation) -> None:
    model = Learner.fresh(STARTER, settings(kind), seed=1)._model
    sizes = model_files.read(str(STARTER))
    assert base_parameters(model) == sizes.parameters
    takes = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    assert takes == pytest.approx(base_bytes(sizes, settings(kind)), rel=0.02)
    assert takes < 0.6 * sizes.weight_bytes


def test_without_bitsandbytes_the_error_says_what_to_do(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelUnusable, match=r"quantisation is nf4, and bitsandbytes is not here .*\[quantised\]"):
        Learner.fresh(tiny_model, settings("nf4"), seed=1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"quantisation": "nf4", "backend": "unsloth"}, "quantisation nf4 takes the backend hf, not unsloth"),
        ({"activation_offload": True, "gradient_checkpointing": False}, "leave gradient_checkpointing unset"),
    ],
)
def test_settings_that_cannot_work_together_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TrainerSettings(**given)
