"""Shard a model in units, each of which is gathered from all processes while it computes, and freed after it.

A unit is a decoder layer, the embedding, the head, or the decoder with what is left (its last norm). Decoder and head
are two roots, since our forward pass reads them apart. A tied embedding and head are one parameter in two units: both
gather the same shards, and neither is whole while the other one or a layer computes.

The base is frozen, so no gradient of a unit is ever reduced. LoRA weights are put on a model that is sharded already:
they belong to no unit, and each process has all of them.
"""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

Result = TypeVar("Result")


def shard(causal: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the model's parameters over the mesh; on the meta device they stay there until they are loaded."""
    decoder, embedding, head = causal.base_model, causal.get_input_embeddings(), causal.get_output_embeddings()
    for unit in (embedding, *_layers(decoder), decoder, head):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    # No gradient flows to a frozen embedding, so the backward pass need not gather it.
    embedding.set_unshard_in_backward(False)
    if mesh.device_type == "cpu":
        # While a layer computes, the next one would be gathered: on a CPU nothing overlaps, and it costs memory.
        for layer in _layers(decoder):
            layer.set_modules_to_backward_prefetch([layer])
    head.read_through = MethodType(_read, head)
    register_fsdp_forward_method(head, "read_through")


def through_head(
    head: torch.nn.Module, read: Callable[..., Result], hidden_SH: Tensor, *others: Any, **named: Any
) -> Result:
    """Return `read(hidden_SH, head, *others, **named)`, with the head's weight whole meanwhile and in its backward."""
    if isinstance(head, FSDPModule):
        # Its hook would do this too, but keep what was gathered beside the weight until the end of the forward pass.
        head.unshard()
        return cast(Result, cast(Any, head).read_through(read, hidden_SH, *others, **named))
    return read(hidden_SH, head, *others, **named)


def reset(causal: PreTrainedModel) -> None:
    """Be able to run again after a pass that raised in the middle, in all processes at the same place."""
    for root in (causal.base_model, causal.get_output_embeddings()):
        if isinstance(root, FSDPModule):
            root.reset_iter_state()


def _read(head: torch.nn.Module, read: Callable[..., Result], hidden_SH: Tensor, *others: Any, **named: Any) -> Result:
    return read(hidden_SH, head, *others, **named)


def _layers(decoder: torch.nn.Module) -> Iterator[Any]:
    """Yield the blocks of the decoder's outermost list."""
    lists = (one for one in decoder.modules() if isinstance(one, torch.nn.ModuleList))
    yield from next(lists, ())
