"""Apply LoRAs by matrix products in vLLM's CPU build. Runs in vLLM's own process (`whetstone.vllm.cpu_worker`).

vLLM's own code for the CPU (0.32, `bgmv_shrink` and `bgmv_expand` in vllm/lora/ops/torch_ops/lora_ops.py) copies the
adapter's weights once for each token and multiplies them token by token. Here the tokens of an adapter are the rows of
one matrix: the same sums, in another order. Tokens without an adapter are left alone; there they get the adapter of the
last slot.
"""

from typing import Any

from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = slice | Tensor
"""Which tokens of the batch: all, or their places."""


class GroupedLora(PunicaWrapperCPU):  # type: ignore[misc]  # the type checker does not read vLLM
    """Computes the LoRAs of a batch, adapter by adapter."""

    _groups: tuple[tuple[int, Rows], ...] = ()
    """Slot of each adapter in the batch, and its tokens."""

    def update_metadata(self, *args: Any, **named: Any) -> None:
        """Take over which token has which adapter. Called before each forward pass."""
        super().update_metadata(*args, **named)
        slots = self.token_lora_indices
        present = slots.unique().tolist()
        self._groups = tuple(
            (slot, slice(None) if len(present) == 1 else (slots == slot).nonzero().flatten())
            for slot in present
            if slot >= 0
        )

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        """Compute y = scale · x Aᵀ, in fp32 as `bgmv_shrink` does. `w_t_all` has the A of each slot."""
        for slot, rows in self._groups:
            y[rows] = scale * (x[rows].to(y.dtype) @ _matrix(w_t_all, slot).to(y.dtype).T)

    def _apply_expand(
        self, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool = True
    ) -> None:
        """Add x Bᵀ to the columns of y, in its type as `bgmv_expand_slice` does. `w_t_all` has the B of each slot."""
        columns = y[:, y_offset : y_offset + y_slice_size]
        for slot, rows in self._groups:
            change = x[rows].to(y.dtype) @ _matrix(w_t_all, slot).to(y.dtype).T
            columns[rows] = columns[rows] + change if add_inputs else change


def _matrix(stacked: Tensor, slot: int) -> Tensor:
    """Return the matrix of one slot: (slots, [1,] rows, columns) -> (rows, columns)."""
    return stacked[slot].view(stacked.shape[-2:])
