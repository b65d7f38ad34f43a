"""Read the sizes of a model from its config.json and the headers of its safetensors. Reads no weights."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.errors import WhetstoneError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, by the names of dtypes in safetensors headers: those that are trained and served as they are."""
OTHER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
LONGEST_HEADER = 100 * 2**20
"""Bytes; the limit of the format's own reader."""
REMEDY = "name a folder with config.json and *.safetensors, or a model of the hub"


class ModelUnreadable(WhetstoneError):
    """The sizes of a model cannot be read; the message gives the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model in numbers. Bytes are those of the saved precision."""

    name: str
    parameters: int
    item_bytes: int
    """Bytes of one parameter of its layers."""
    weight_bytes: int
    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; of a mixture, of all experts that one token passes."""
    query: int
    """Width of the queries: heads times the size of a head."""
    key_value_bytes: int
    """Bytes of the keys and values of one token in all layers."""
    vocabulary: int
    embedding_bytes: int
    head_bytes: int
    largest_layer_bytes: int
    lora_width: int
    """Sum of inputs and outputs of all linear layers but the head: times the rank, the parameters of a LoRA."""
    quantisable: int
    """Parameters of the layers that `trainer.quantisation` reaches: all linear ones but the head and experts."""
    quantisable_outputs: int
    """Sum of the outputs of these layers."""
    largest_linear: int
    """Parameters of the largest of these layers."""
    longest: int
    """Tokens that the model's positions allow."""

    @property
    def billions(self) -> str:
        """The parameters for people: 7.6B, 135M."""
        return f"{self.parameters / 1e9:.1f}B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.3g}M"


def read(model: str) -> ModelSizes:
    """Return the sizes of a folder's model, or of a name on the hub: from the local cache, else from the hub.

    Of a model on the hub only config.json and headers are fetched. A gated one needs HF_TOKEN in the environment.

    Raises:
        ModelUnreadable: the files cannot be read, or are not those of a model that can be planned.
    """
    folder = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or folder.is_dir():
        return of_folder(folder)
    return _of_hub(model)


def of_folder(folder: Path, name: str | None = None) -> ModelSizes:
    """Return the sizes of the model in a folder; `name`: other than the folder's. Raises ModelUnreadable."""
    config = _json(folder / "config.json")
    files = _weight_files(folder)
    if not files:
        raise ModelUnreadable(f"{folder}: no *.safetensors; {REMEDY}")
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors |= header(file)
    return sizes(name or folder.resolve().name, config, tensors)


def header(file: Path) -> dict[str, TensorHeader]:
    """Return what a safetensors file says of its tensors. Raises ModelUnreadable."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            listed = json.loads(opened.read(length))
        return {
            name: TensorHeader(one["dtype"], tuple(one["shape"]))
            for name, one in listed.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelUnreadable(f"{file} is no safetensors file: {error}; {REMEDY}") from error


def sizes(name: str, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> ModelSizes:
    """Return the sizes by a model's config and its tensors.

    Raises:
        ModelUnreadable: the config is not that of a causal transformer, or the model is quantised.
    """
    if "quantization_config" in config:
        raise ModelUnreadable(f"{name} is quantised, and only models in 16 or 32 bits are trained; take its original")
    text = config.get("text_config") or config
    try:
        layers, hidden, heads = (int(text[key]) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        vocabulary = int(text["vocab_size"])
        longest = int(text.get("max_position_embeddings") or 0)
        head_size = int(text.get("head_dim") or hidden // heads)
        key_heads = int(text.get("num_key_value_heads") or heads)
        intermediate = _intermediate(text, hidden)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelUnreadable(f"{name}: its config.json is not that of a language model ({error}); {REMEDY}") from error
    if strange := sorted({one.dtype for one in tensors.values()} - ITEM_BYTES.keys() - OTHER_BYTES.keys()):
        raise ModelUnreadable(f"{name} has weights in {strange[0]}; only models in 16 or 32 bits are trained")
    # A tied head may be saved beside the embedding that it is.
    if text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        tensors = {key: one for key, one in tensors.items() if not key.startswith("lm_head")}
    tables = [one for one in tensors.values() if len(one.shape) == 2 and one.shape[0] >= vocabulary]
    table_bytes = max((_bytes(one) for one in tables), default=0)
    linear = [one for one in tensors.values() if len(one.shape) == 2 and one.shape[0] < vocabulary]
    # The files have a mixture's experts as matrices; in the model they are one tensor of three axes.
    experts = {id(one) for key, one in tensors.items() if ".experts." in key}
    quantisable = [one for one in linear if id(one) not in experts]
    if not tables or not linear:
        raise ModelUnreadable(f"{name}: its files have no embedding or no linear layers; {REMEDY}")
    item_bytes = max(ITEM_BYTES.get(one.dtype, 0) for one in linear)
    weight_bytes = sum(map(_bytes, tensors.values()))
    cached = (
        int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)  # DeepSeek's: one latent for all heads
        if text.get("kv_lora_rank")
        else 2 * key_heads * head_size
    )
    return ModelSizes(
        name=name,
        parameters=sum(one.numbers for one in tensors.values()),
        item_bytes=item_bytes,
        weight_bytes=weight_bytes,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        query=heads * head_size,
        key_value_bytes=layers * cached * item_bytes,
        vocabulary=vocabulary,
        embedding_bytes=table_bytes,
        head_bytes=table_bytes,
        largest_layer_bytes=(weight_bytes - sum(map(_bytes, tables))) // layers,
        lora_width=sum(sum(one.shape) for one in linear),
        quantisable=sum(one.numbers for one in quantisable),
        quantisable_outputs=sum(one.shape[0] for one in quantisable),
        largest_linear=max((one.numbers for one in quantisable), default=0),
        longest=longest,
    )


def _intermediate(text: Mapping[str, Any], hidden: int) -> int:
    """Return the width of the MLP that one token passes."""
    if experts := text.get("num_experts_per_tok"):
        width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
        return int(experts) * width + int(text.get("shared_expert_intermediate_size") or 0)
    return int(text.get("intermediate_size") or 4 * hidden)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights; those that the index names, if there is one, whether they are there or not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / str(file) for file in _json(index).get("weight_map", {}).values()})
    return sorted(folder.glob("*.safetensors"))


def _bytes(one: TensorHeader) -> int:
    return one.numbers * (ITEM_BYTES.get(one.dtype) or OTHER_BYTES[one.dtype])


def _json(path: Path) -> dict[str, Any]:
    try:
        read_config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelUnreadable(f"{path} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(read_config, dict):
        raise ModelUnreadable(f"{path} is no object; {REMEDY}")
    return read_config


def _of_hub(model: str) -> ModelSizes:
    try:
        from huggingface_hub import get_safetensors_metadata, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, NotASafetensorsRepoError
    except ImportError as error:
        raise ModelUnreadable(
            f"{model} is no folder here, and huggingface_hub is not installed to ask the hub: name a folder"
        ) from error
    import httpx

    try:
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str) and (files := _weight_files(Path(cached).parent)) and all(map(Path.is_file, files)):
            return of_folder(Path(cached).parent, model)
        config = Path(hf_hub_download(model, "config.json"))
        listed = get_safetensors_metadata(model).files_metadata.values()
        tensors = {
            name: TensorHeader(one.dtype, tuple(one.shape)) for file in listed for name, one in file.tensors.items()
        }
    except HFValidationError as error:
        raise ModelUnreadable(f"{model} is no folder here and no name of the hub; {REMEDY}") from error
    except (HfHubHTTPError, NotASafetensorsRepoError, OSError, ValueError, httpx.HTTPError) as error:
        why = str(error).strip().partition("\n")[0]
        raise ModelUnreadable(
            f"{model}: its files cannot be had from the hub ({why}); name a folder, or for a gated model set HF_TOKEN"
        ) from error
    return sizes(model, _json(config), tensors)
