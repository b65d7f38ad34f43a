"""A device whose memory runs out at chosen moments: the model's own hooks raise what torch raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from trainer.learner.learner import Learner

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"


@contextmanager
def shortage(learner: Learner, runs_out: Callable[[str, int], bool]) -> Iterator[list[tuple[str, int]]]:
    """Yield the moments at which memory has run out so far.

    `runs_out` is asked before each LoRA layer of a forward pass, and each time that a weight gets its gradient, with
    the name of the way (forward, backward) and how many tokens the micro-batch has.
    """
    moments: list[tuple[str, int]] = []
    tokens = 0

    def meet(way: str) -> None:
        if runs_out(way, tokens):
            moments.append((way, tokens))
            raise torch.OutOfMemoryError(MESSAGE)

    def before_module(module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        nonlocal tokens
        if isinstance(module, torch.nn.Linear) and "lora_A" in names.get(id(module), ""):
            states = arguments[0]
            assert isinstance(states, Tensor)
            tokens = states.shape[:-1].numel()
            meet("forward")

    def on_gradient(_gradient: Tensor) -> None:
        meet("backward")

    names = {id(module): name for name, module in learner._model.named_modules()}
    hooks = [register_module_forward_pre_hook(before_module)]
    hooks += [weight.register_hook(on_gradient) for weight in learner._trained.values()]
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()
