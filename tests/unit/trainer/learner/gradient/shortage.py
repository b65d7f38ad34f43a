"""A device whose memory runs out at chosen moments: torch's own hooks raise what torch raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@contextmanager
def shortage(runs_out: Callable[[str, int], bool]) -> Iterator[list[tuple[str, int]]]:
    """Yield the moments at which memory has run out so far.

    `runs_out` is asked with the name of the way (forward, backward) and how many tokens the micro-batch has: before
    each linear layer of an adapter (A and B of each projection), and before its gradient.
    """
    moments: list[tuple[str, int]] = []

    def meet(way: str, tokens: int) -> None:
        if runs_out(way, tokens):
            moments.append((way, tokens))
            raise torch.OutOfMemoryError(MESSAGE)

    def before(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if is_adapter(module):
            meet("forward", arguments[0].shape[:-1].numel())

    def after(module: torch.nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if is_adapter(module) and output.requires_grad:
            output.register_hook(partial(on_gradient, arguments[0].shape[:-1].numel()))

    def on_gradient(tokens: int, _gradient: Tensor) -> None:
        meet("backward", tokens)

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


def is_adapter(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) and module.weight.requires_grad
