"""Compute the bytes of a vLLM on its device: weights, LoRA slots, its own work, and what is left for the KV cache.

Sizes of LoRA slots and defaults of the scheduler are vLLM 0.32's (`vllm/lora/layers`, `EngineArgs` in
`vllm/engine/arg_utils.py`: get_batch_defaults).
"""

from dataclasses import dataclass

from whetstone.config.settings import Settings
from whetstone.memory.model_files import ModelSizes

GIB = 2**30
PROCESS_BYTES = int(0.6 * GIB)
"""vLLM's CUDA context, with libraries and workspaces. Stated, not measured here."""
GRAPHS_BYTES = 1 * GIB
"""Captured CUDA graphs. Stated, not measured here."""
LARGE_CARD_BYTES = 70 * GIB
"""From this memory on, vLLM runs larger batches."""
ASLEEP_BYTES = int(1.55 * GIB)
"""What a sleeping vLLM leaves on the card: its process, graphs, buffers. Measured on an H100 with a model of 135M."""


@dataclass(frozen=True, slots=True)
class ServerBytes:
    """The bytes of one vLLM on each of its devices."""

    item_bytes: int
    """Bytes of a number."""
    weights: int
    adapters: int
    """The slots of `vllm.max_loras` adapters."""
    work: int
    """Context, graphs, activations of the largest batch, logits."""
    kv_cache: int
    """What is left; negative if the rest does not fit."""
    kv_tokens: int
    """Tokens of the KV cache, 0 if there is none."""


def server_bytes(model: ModelSizes, settings: Settings, card_bytes: int, utilisation: float, cards: int) -> ServerBytes:
    """Return the bytes of a vLLM that has this share of each of its cards, among which it divides the model."""
    vllm = settings.vllm
    item_bytes = served_item_bytes(model, vllm.dtype)
    weights = model.weight_bytes * item_bytes // model.item_bytes // cards
    # Beside the linear layers, embedding and head have slots too, whether an adapter changes them or not.
    width = model.lora_width + 2 * (model.vocabulary + model.hidden)
    adapters = vllm.max_loras * settings.trainer.lora_rank * width * item_bytes // cards
    large = card_bytes >= LARGE_CARD_BYTES
    batch_tokens, sequences = (8192, 1024) if large else (2048, 256)
    eager = bool(vllm.enforce_eager)
    work = (
        PROCESS_BYTES
        + (0 if eager else GRAPHS_BYTES)
        + batch_tokens * (4 * model.hidden + 3 * model.intermediate) * item_bytes
        + sequences * model.vocabulary * (item_bytes + 8)
    )
    kv_cache = int(utilisation * card_bytes) - weights - adapters - work
    token_bytes = max(1, model.key_value_bytes * item_bytes // model.item_bytes // cards)
    return ServerBytes(item_bytes, weights, adapters, work, kv_cache, max(0, kv_cache) // token_bytes)


def served_item_bytes(model: ModelSizes, dtype: str) -> int:
    """Return the bytes of a number in vLLM with this `vllm.dtype`; `auto` takes the model's own."""
    return {"auto": model.item_bytes, "float32": 4, "float": 4}.get(dtype, 2)
