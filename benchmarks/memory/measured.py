"""Count the bytes that a training step really allocates, and compare them with the plan's formulas.

`python -m benchmarks.memory.measured [FOLDER ...]`: a step of the trainer on each folder's model on the CPU, and traces
of Qwen2.5 shapes up to 32B, which allocate nothing (FakeTensor). One line each: counted, planned, their ratio.

What kernels allocate for themselves, the allocator's fragments and CUDA's own memory are not counted.
"""

import math
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.memory.shapes import QWEN, Shape
from trainer.domain.rows import Row
from trainer.learner import attention, hf
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings
from whetstone.memory.model_files import ModelSizes, TensorHeader, read, sizes
from whetstone.memory.training import step_bytes

SETTINGS = TrainerSettings(
    device="cpu", threads=1, gradient_checkpointing=True, micro_batch_tokens=64, max_row_tokens=2**15, measure_kl=False
)


@dataclass(frozen=True)
class Comparison:
    """Bytes of a step beside the base and the adapter: activations and logits."""

    what: str
    counted: int
    planned: int

    @property
    def ratio(self) -> float:
        """Planned bytes for each that was counted."""
        return self.planned / self.counted


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, as long as they exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def leave_out(self, tensors: Any) -> None:
        """Do not count these, which exist already."""
        for one in tensors:
            self._known[one.untyped_storage()] = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage() not in self._known:
                storage = one.untyped_storage()
                self._known[storage] = None
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, count: int) -> None:
        self.now -= count


def of_step(folder: Path, tokens: int, settings: TrainerSettings = SETTINGS) -> Comparison:
    """Return the bytes of a real step on a model whose one row has so many tokens, all but one sampled."""
    learner = Learner.fresh(folder, settings, seed=0)
    row = Row(
        trajectory_id="a",
        token_ids_T=tuple(place % 1000 for place in range(tokens)),
        sampled_T=(False, *[True] * (tokens - 1)),
        inference_logprobs_T=(math.nan, *[-10.0] * (tokens - 1)),
        versions_T=(-1, *[0] * (tokens - 1)),
        temperatures_T=(1.0,) * tokens,
        advantages_T=(0.0, *[1.0] * (tokens - 1)),
    )
    with AllocatedBytes() as counted:
        counted.leave_out(learner._model.parameters())
        counted.leave_out(learner._model.buffers())
        learner.step([row], 0)
    # Until the optimizer's first step there are no moments: at the peak the adapter has its gradient at most.
    lora = sum(one.numel() for one in learner._model.parameters() if one.requires_grad)
    return _compared(folder.name, read(str(folder)), settings, tokens, counted.most, gradient=4 * lora)


def of_trace(name: str, shape: Shape, tokens: int, settings: TrainerSettings = SETTINGS) -> Comparison:
    """Return the bytes of a forward and backward pass through the decoder of a shape; nothing is allocated."""
    tree = attention.Tree("segments", [tokens], [attention.Part(0, 0, tokens, [], None)])
    counted, gradient = traced(shape, tree, tokens, settings)
    tensors = {key: TensorHeader("BF16", of) for key, of in shape.tensors().items()}
    planned = sizes(name, shape.config(), tensors)
    return _compared(name, planned, settings, tokens, counted, gradient=gradient, head=False)


def traced(shape: Shape, tree: attention.Tree, tokens: int, settings: TrainerSettings = SETTINGS) -> tuple[int, int]:
    """Return the bytes that a pass forward and back through the decoder allocates, and those of the LoRA's gradient."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(Qwen2Config(**shape.config()), dtype=torch.bfloat16)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=settings.lora_rank, lora_dropout=0.0)
    model = hf.adapted(plain, lora, settings)
    hf.made_ready(model, settings)
    causal = model.get_base_model()
    causal.set_attn_implementation(attention.NAME)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for owned in (module._parameters, module._buffers):
                for key, one in owned.items():
                    if one is not None:
                        fake = torch.empty(one.shape, dtype=one.dtype)
                        is_weight = isinstance(one, torch.nn.Parameter)
                        owned[key] = torch.nn.Parameter(fake, one.requires_grad) if is_weight else fake
        with AllocatedBytes() as counted:
            counted.leave_out(model.parameters())
            counted.leave_out(model.buffers())
            states_BTH = causal.base_model(
                input_ids=torch.zeros(1, tokens, dtype=torch.long),
                position_ids=torch.arange(tokens)[None],
                use_cache=False,
                tree=tree,
            ).last_hidden_state
            states_BTH.backward(torch.zeros_like(states_BTH))
    return counted.most, 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)


def _compared(
    name: str,
    model: ModelSizes,
    settings: TrainerSettings,
    tokens: int,
    counted: int,
    *,
    gradient: int,
    head: bool = True,
) -> Comparison:
    planned = step_bytes(model, settings, tokens, accelerator=False)
    return Comparison(
        f"{name}, {tokens} tokens", counted - gradient, planned.activations + (planned.head if head else 0)
    )


def main(folders: list[str]) -> None:
    """Print a line for each comparison."""
    for folder in folders:
        for tokens in (256, 1024):
            _show(of_step(Path(folder), tokens))
    for name, shape in QWEN.items():
        _show(of_trace(name, shape, 8192))


def _show(one: Comparison) -> None:
    print(f"{one.what}: counted {one.counted / 2**20:.0f} MiB, planned {one.planned / 2**20:.0f}, {one.ratio:.2f}")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
