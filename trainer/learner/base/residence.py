"""Move a learner between its device and host memory, so that vLLM can have the device between steps.

The base never changes: its weights stay in one block of host memory, pinned where the device is CUDA, and only a copy
of them is on the device during a step. The LoRA and the moments of its optimizer move both ways.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 4096


class HostWeights:
    """A base model's weights in host memory; the models of all policies share them."""

    def __init__(self, weights: Iterable[torch.nn.Parameter], device: torch.device) -> None:
        """Move the weights from their device into one block of host memory, one by one."""
        self.device = device
        """Where they are during a step."""
        self.base = list(weights)
        block, self.copies = _moved_into_one_block(self.base)
        """The same weights, in the same order, in the block."""
        if device.type == "cuda":
            _pin(block)
            # The block is freed after it was unlocked: the call's argument keeps it until then.
            weakref.finalize(self, _unpin, block).atexit = False


class Residence:
    """Where a learner's weights are: on the device inside `present`, else in host memory."""

    def __init__(self, model: torch.nn.Module, host: HostWeights) -> None:
        """`model`: modules on the weights of `host`, with a LoRA of its own or without."""
        self._model = model
        self._weights = host
        self._base, self._host, self._device = host.base, host.copies, host.device
        self._optimizer: torch.optim.Optimizer | None = None
        self._depth = 0

    def with_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's moments together with the LoRA."""
        self._optimizer = optimizer

    @contextmanager
    def present(self) -> Iterator[None]:
        """Have everything on the device inside the context, and nothing of it after, also after an error."""
        self._depth += 1
        try:
            if self._depth == 1:
                for weight, host in zip(self._base, self._host, strict=True):
                    weight.data = _copy(host, self._device)
                self._move_lora(self._device)
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._leave()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Be able to read a few tokens while the device is somebody else's: layers come when they are needed, and go.

        The head and the LoRA stay on the device within the context. Gradients are not possible in it.
        """
        if self._depth:
            yield
            return
        weights_of = self._passing_weights

        def come(part: torch.nn.Module, _inputs: Any) -> None:
            for weight, host in weights_of[part]:
                weight.data = _copy(host, self._device)

        def go(part: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            for weight, host in weights_of[part]:
                weight.data = host

        passing = {weight for weights in weights_of.values() for weight, _ in weights}
        with ExitStack() as stack:
            stack.callback(self._leave)
            for part in weights_of:
                stack.callback(part.register_forward_pre_hook(come).remove)
                stack.callback(part.register_forward_hook(go).remove)
            for weight, host in zip(self._base, self._host, strict=True):
                if weight not in passing:
                    weight.data = _copy(host, self._device)
            self._move_lora(self._device)
            yield

    @cached_property
    def _passing_weights(self) -> dict[torch.nn.Module, list[tuple[torch.nn.Parameter, Tensor]]]:
        """The parts that can pass, and of each the weights that come and go with it, with their copies on the host.

        Weights of several parts, and those of the head, stay.
        """
        host_of = dict(zip(self._base, self._host, strict=True))
        weights_of = {part: list(part.parameters()) for part in _parts(self._model)}
        parts_with = Counter(weight for weights in weights_of.values() for weight in weights)
        head = _weights_of_head(self._model)
        return {
            part: [
                (one, host_of[one]) for one in weights if one in host_of and parts_with[one] == 1 and one not in head
            ]
            for part, weights in weights_of.items()
        }

    def _leave(self) -> None:
        for weight, host in zip(self._base, self._host, strict=True):
            weight.data = host
        self._move_lora(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_lora(self, device: torch.device) -> None:
        for weight in self._model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.to(device)
                # AdamW counts its steps on the CPU.
                state = {} if self._optimizer is None else self._optimizer.state.get(weight, {})
                for key in state.keys() - {"step"}:
                    state[key] = state[key].to(device)


def _copy(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device, on a CPU too: what is on the device is never the host's."""
    return host.to(device, non_blocking=True, copy=True)


def _parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return what can pass one by one: the embedding, and the blocks of the outermost list of layers."""
    lists = [one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) > 1]
    embeddings = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
    return [*embeddings, *(lists[0] if lists else ())]


def _weights_of_head(model: Any) -> set[Tensor]:
    """Return the weights of the head, which our own code multiplies with; with a tied head, the embedding's."""
    return set(model.get_output_embeddings().parameters())


def _moved_into_one_block(weights: list[torch.nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """Move the weights into one block of host memory; return the block, and them in it.

    torch's own pinned memory is rounded up to a power of 2 for each tensor, up to twice the size; one block is not.
    """
    sizes = [-(-weight.nbytes // PAGE_BYTES) * PAGE_BYTES for weight in weights]
    block = torch.empty(sum(sizes), dtype=torch.uint8)
    places = [0, *itertools.accumulate(sizes)]
    host = []
    for weight, place in zip(weights, places, strict=False):
        moved = block[place : place + weight.nbytes].view(weight.dtype).view(weight.shape)
        moved.copy_(weight.data)
        weight.data = moved
        host.append(moved)
    return block, host


def _pin(block: Tensor) -> None:
    """Lock the memory in its place, for fast copies."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), block.nbytes, 0)))


def _unpin(block: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(block.data_ptr())
