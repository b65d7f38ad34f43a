"""LoRAs by matrix products: what vLLM's own code for the CPU computes, and nothing for tokens without an adapter."""

import pytest
import torch

# Of torch, as it is imported by vLLM.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

SLOTS, RANK, IN, OUT = 4, 8, 48, 40
NONE = -1
"""vLLM's slot of a token without an adapter."""


def applied(wrapper: object, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return what a linear layer's LoRAs add for tokens with the adapters of these slots: two slices, as of q and k."""
    from vllm.lora.layers.utils import LoRAMapping

    draw = torch.Generator().manual_seed(len(tokens))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    shrinks = tuple(random(SLOTS, 1, RANK, IN) for _ in range(2))
    expands = tuple(random(SLOTS, 1, OUT, RANK) for _ in range(2))
    y, x = random(len(tokens), 2 * OUT), random(len(tokens), IN)
    before = y.clone()
    # vLLM knows adapters by ids from 1 on, 0 is none, and keeps a list of the id in each slot.
    mapping = LoRAMapping(tuple(slot + 1 for slot in tokens), tuple(slot + 1 for slot in tokens), is_prefill=True)
    wrapper.update_metadata(mapping, [slot + 1 for slot in range(SLOTS)], SLOTS, 100)  # type: ignore[attr-defined]
    wrapper.add_lora_linear(y, x, shrinks, expands, 0.5, (OUT, OUT))  # type: ignore[attr-defined]
    return y - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "tokens", [[0] * 70, [2], [1, 1, 3, 3, 3, 0], [0, NONE, NONE, 2, 0], [NONE] * 5], ids=lambda tokens: str(tokens[:6])
)
def test_the_products_are_vllms_and_tokens_without_an_adapter_stay(tokens: list[int], dtype: torch.dtype) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from whetstone.vllm.cpu_lora import GroupedLora

    ours = applied(GroupedLora(128, 16, "cpu"), tokens, dtype)
    vllms = applied(PunicaWrapperCPU(128, 16, "cpu"), tokens, dtype)
    adapted = torch.tensor(tokens) != NONE
    assert not ours[~adapted].any()
    close = {torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]  # bf16: a rounding of sums of some 30
    torch.testing.assert_close(ours[adapted], vllms[adapted], rtol=0.02, atol=close)
    assert not adapted.any() or ours[adapted].abs().mean() > 1
