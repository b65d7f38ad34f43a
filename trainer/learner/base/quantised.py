"""Put the linear layers of a frozen base into 4 or 8 bits, and widen each of them when it is read.

bitsandbytes quantises and widens. Its own layers are used only while the model loads: its int8 product (LLM.int8())
looks for outliers over all tokens of a batch, so that the result of a row would depend on other rows, and both of its
layers have state beside their weights, which policies cannot share and `Residence` cannot move.

- A product is x · Wᵀ with W widened to the precision of x, forward and backward. Nothing of x is rounded.
- All that is large of a layer is a parameter.
- Embeddings, norms and the head stay in the precision of the files; so do experts of a mixture, which are no layers.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import BitsAndBytesConfig, PreTrainedModel

from trainer.errors import ModelUnusable
from whetstone.config.trainer import Quantisation

REMEDY = (
    'install it into the training worker\'s environment (pip install "whetstone-proxy[quantised]"), or set '
    "trainer.quantisation to none"
)
INT8_STEPS = 127
"""Steps of int8 on each side of 0."""


class QuantisedLinear(torch.nn.Linear):
    """A linear layer whose weight is in fewer bits. peft adds a LoRA to it as to any other."""

    def __init__(self, of_bitsandbytes: torch.nn.Linear) -> None:
        """Take over the weight and the bias of one of bitsandbytes' layers."""
        torch.nn.Module.__init__(self)  # Linear's own would allocate the weight
        self.in_features, self.out_features = of_bitsandbytes.in_features, of_bitsandbytes.out_features
        self.weight = _frozen(of_bitsandbytes.weight.data)
        self.bias = of_bitsandbytes.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x · Wᵀ + b in the precision of x."""
        return cast(Tensor, _Product.apply(x, self))  # type: ignore[no-untyped-call]  # of torch

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in)."""
        raise NotImplementedError


class Int8Linear(QuantisedLinear):
    """Int8, with a scale for each output."""

    def __init__(self, of_bitsandbytes: torch.nn.Linear) -> None:
        super().__init__(of_bitsandbytes)
        self.scales_O = _frozen(cast(Any, of_bitsandbytes.weight).SCB / INT8_STEPS)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in)."""
        return self.weight.to(dtype).mul_(self.scales_O[:, None])


class Nf4Linear(QuantisedLinear):
    """NF4, with a scale for each block of 64 weights, itself in 8 bits (arXiv 2305.14314)."""

    table_K: Tensor
    offset: Tensor

    def __init__(self, of_bitsandbytes: torch.nn.Linear) -> None:
        super().__init__(of_bitsandbytes)
        state = cast(Any, of_bitsandbytes.weight).quant_state
        self._blocks = (state.blocksize, state.state2.blocksize)
        self.scales_N = _frozen(state.absmax)
        self.scales_of_scales_M = _frozen(state.state2.absmax)
        self.register_buffer("table_K", state.state2.code)
        self.register_buffer("offset", state.offset)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (out, in)."""
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        block, block_of_scales = self._blocks
        scales_N = dequantize_blockwise(
            self.scales_N.data, absmax=self.scales_of_scales_M.data, code=self.table_K, blocksize=block_of_scales
        ).add_(self.offset)
        shape = torch.Size((self.out_features, self.in_features))
        state = QuantState(scales_N, shape=shape, dtype=dtype, blocksize=block, quant_type="nf4")
        return cast(Tensor, dequantize_4bit(self.weight.data, state))


class _Product(torch.autograd.Function):
    """x · Wᵀ + b. The gradient flows to x only; the weight is widened again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.widened(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor) -> tuple[Tensor, None]:
        return by_y @ ctx.layer.widened(by_y.dtype), None


def loading(quantisation: Quantisation) -> dict[str, Any]:
    """Return the arguments by which transformers quantises each tensor as it reads it.

    Raises:
        ModelUnusable: bitsandbytes is not installed, or does not load.
    """
    if quantisation == "none":
        return {}
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # its library may not load, for want of another
        raise ModelUnusable(
            f"trainer.quantisation is {quantisation}, and bitsandbytes is not here ({error}): {REMEDY}"
        ) from error
    if quantisation == "int8":
        return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return {"quantization_config": config}


def with_own_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Replace bitsandbytes' layers in a loaded model by those of this module, on the same memory.

    Raises:
        ModelUnusable: no layer is quantised.
    """
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    layers = {name: one for name, one in model.named_modules() if isinstance(one, Linear4bit | Linear8bitLt)}
    if not layers:
        raise ModelUnusable(f"{type(model).__name__} has no linear layer to quantise: set trainer.quantisation to none")
    for name, layer in layers.items():
        model.set_submodule(name, (Nf4Linear if isinstance(layer, Linear4bit) else Int8Linear)(layer))
    # From here on it is a model like any other, which peft and `Module.to` take without a case of their own.
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = model.is_loaded_in_8bit = False
    return model


def base_parameters(model: torch.nn.Module) -> int:
    """Return how many parameters a frozen base has; a quantised layer counts as many as it had before."""
    layers = [one for one in model.modules() if isinstance(one, QuantisedLinear)]
    packed = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)} - {
        id(layer.bias) for layer in layers
    }
    others = sum(one.numel() for one in model.parameters() if not one.requires_grad and id(one) not in packed)
    return others + sum(layer.in_features * layer.out_features for layer in layers)


def _frozen(numbers: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(numbers, requires_grad=False)
