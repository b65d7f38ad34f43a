"""Compute the bytes of a training step on its device: the base, the adapter with its optimizer, activations, the head.

What the trainer's forward and backward pass stores for each token and layer was counted in traces of Qwen2 layers under
peft 0.21 with transformers' attention; `benchmarks/memory` counts it again, and a test holds the formulas to it.
"""

from dataclasses import dataclass

from whetstone.config.trainer import TrainerSettings
from whetstone.memory.model_files import ModelSizes

TRAINER_BYTES = 1066 * 2**20
"""The trainer's CUDA context, with libraries, workspaces and kernels: what it had between two steps on an H100, its
weights in host memory (PyTorch 2.11 for CUDA 13, flex-attention)."""
ADAPTER_BYTES = 16
"""Bytes of one parameter of the LoRA in a step: weight, gradient and AdamW's two moments in fp32."""
CHUNK_BYTES = 4 * 2**25
"""Most bytes of the head's logits that exist at once (`trainer.learner.chunked_head.CHUNK_LOGITS` in fp32)."""
SLICE_BYTES = 4 * 2**24
"""Bytes of the part of a 16-bit head that is widened at once, where the device is no CUDA
(`trainer.learner.chunked_head.SLICE_WEIGHTS` in fp32)."""
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, a scale of 8 bits for a block of 64, one of 32 bits for 256 of these scales."""
ROW_STEP = 256
"""Rows are planned in multiples of so many tokens."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of a step on its device, without what the process itself needs."""

    base: int
    """Weights; of a sharded base this process's share, and what is gathered at once beside it; where they are
    quantised, with the largest layer widened."""
    adapter: int
    """Weights, gradient and optimizer of the LoRA."""
    activations: int
    """At the peak of the backward pass."""
    head: int
    """What logits take beside the activations at their own peak, as far as it exceeds that of a layer."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.base + self.adapter + self.activations + self.head


def lora_parameters(model: ModelSizes, trainer: TrainerSettings) -> int:
    """Return how many parameters a LoRA on all linear layers has."""
    return trainer.lora_rank * model.lora_width


def step_bytes(model: ModelSizes, trainer: TrainerSettings, tokens: int, *, accelerator: bool = True) -> StepBytes:
    """Return what a step needs whose largest micro-batch has so many tokens.

    With checkpointing a layer keeps its input only, and one layer at a time is computed again and goes backward.
    Without it, all layers keep what their backward pass needs.
    """
    checkpointing = trainer.gradient_checkpointing
    if checkpointing is None:
        checkpointing = accelerator
    kept, passing = _layer_bytes(model)
    inputs = model.layers * model.item_bytes * model.hidden
    if trainer.activation_offload and accelerator:
        inputs //= model.layers  # one layer's; the others wait in host memory
    standing = inputs if checkpointing else model.layers * kept
    backward = passing + (kept if checkpointing else 0)
    # The decoder's output, its gradient, and what the last norm keeps.
    ends = (2 * model.item_bytes + 4) * model.hidden
    logits = logits_bytes(model, tokens, accelerator=accelerator)
    if trainer.sharding == "fsdp":
        # The head is gathered into a buffer and copied out of that; logits come after it.
        logits = max(logits, model.head_bytes)
    in_head = 2 * model.item_bytes * model.hidden * tokens + logits
    activations = (standing + backward + ends) * tokens
    widened = 0 if trainer.quantisation == "none" else model.item_bytes * model.largest_linear
    return StepBytes(
        base=base_bytes(model, trainer) + widened,
        adapter=ADAPTER_BYTES * lora_parameters(model, trainer),
        activations=activations,
        head=max(0, in_head - backward * tokens),
    )


def base_bytes(model: ModelSizes, trainer: TrainerSettings) -> int:
    """Return what the base takes of a device: all its weights, or a share of them and what is gathered at once.

    That is the embedding or the head, or a layer with the next one, which is gathered ahead (`sharded.units`).
    """
    if trainer.sharding == "none":
        return weight_bytes(model, trainer)
    gathered = max(model.embedding_bytes, model.head_bytes, 2 * model.largest_layer_bytes)
    return -(-model.weight_bytes // trainer.processes) + gathered


def weight_bytes(model: ModelSizes, trainer: TrainerSettings) -> int:
    """Return the bytes of the whole base's weights, which may be quantised."""
    rest = model.weight_bytes - model.item_bytes * model.quantisable
    if trainer.quantisation == "nf4":
        return rest + int(NF4_BYTES * model.quantisable)
    if trainer.quantisation == "int8":
        return rest + model.quantisable + 4 * model.quantisable_outputs
    return model.weight_bytes


def reading_bytes(model: ModelSizes, tokens: int) -> int:
    """Return the most bytes of activations and logits of a forward pass without a gradient: those of one layer."""
    layer = (2 * model.item_bytes + 4) * model.hidden + 3 * model.item_bytes * (model.query + model.intermediate)
    return layer * tokens + logits_bytes(model, tokens)


def logits_bytes(model: ModelSizes, tokens: int, *, accelerator: bool = True) -> int:
    """Return the bytes of the head's tables at their peak, where so many tokens are read.

    Forward: logits, probabilities, and their product. Backward: probabilities and their gradient, and of more than one
    chunk the logits, which are computed again; with a head in 16 bits, CUDA splits the gradient into two halves of 16
    bits by way of one more table, and elsewhere slices of the head are widened.
    """
    logits = 4 * model.vocabulary * tokens
    table = min(CHUNK_BYTES, logits)
    backward = (3 if logits > CHUNK_BYTES else 2) * table
    if model.item_bytes < 4:
        backward += 2 * table if accelerator else min(SLICE_BYTES, 4 * model.vocabulary * model.hidden)
    return max(3 * table, backward)


def longest_row(model: ModelSizes, trainer: TrainerSettings, free_bytes: float, *, most: int) -> int:
    """Return the most tokens of a micro-batch, up to `most`, with which a step fits into the bytes; 0 if none does."""
    low, high = 0, max(1, most // ROW_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if step_bytes(model, trainer, middle * ROW_STEP).total <= free_bytes:
            low = middle
        else:
            high = middle - 1
    return min(low * ROW_STEP, most)


def _layer_bytes(model: ModelSizes) -> tuple[int, int]:
    """Return the bytes of one token that a layer keeps for its backward pass, and those that pass through in it.

    Kept, for item bytes b: both norms' inputs in fp32 (8 a hidden), the inputs of the linear layers in fp32, which peft
    casts for each of q, k, v, gate and up in 16 bits (20 a hidden; 8 in fp32, where they are shared with the norms'
    outputs), of o (4 a query) and of down (4 an intermediate); queries, keys, values (repeated for each query head) and
    output of attention (4b a query); gate, its activation, and up (3b an intermediate).
    Passing: gradients of the residual stream and of the MLP.
    """
    b = model.item_bytes
    wide = b >= 4
    kept = (16 if wide else 28) * model.hidden + (4 * b + 4) * model.query + (3 * b + 4) * model.intermediate
    passing = (8 if wide else 16) * model.hidden + (8 if wide else 4) * model.intermediate
    return kept, passing
