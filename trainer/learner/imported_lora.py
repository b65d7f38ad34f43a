"""Turn a LoRA that was trained elsewhere into a learner of ours: checked against the base model, with a new optimizer.

Reads safetensors only: other formats run code when they are read.
"""

import json
import operator
from pathlib import Path
from typing import cast

import safetensors
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

from trainer.errors import AdapterMismatch
from trainer.learner import hf
from trainer.learner.base.shared import shared_base
from trainer.learner.learner import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ALONE, Learner
from whetstone.config.trainer import TrainerSettings

CPU = torch.device("cpu")
NOT_SERVED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "layer_replication", "target_parameters",
    "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
    "velora_config",
)  # fmt: skip
"""Fields of peft's config that add more to a LoRA than the two matrices of a layer."""
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Named initializations of a LoRA that leave the base model's weights unchanged."""


def adopt(model_path: str | Path, folder: Path, settings: TrainerSettings, seed: int, max_rank: int) -> Learner:
    """Load the adapter in peft's `folder` onto the base model, with its own rank and alpha and a new AdamW state.

    It always runs on the CPU: a step may be using the device that the settings name. No layer's rank may be above
    `max_rank`: matrices are created as large as the config requires before the adapter's weights are compared.

    Raises:
        ModelUnusable: the base model cannot be loaded.
        AdapterMismatch: it is no plain LoRA in safetensors, it is of another base model, or its rank is too high.
    """
    config = _config(folder)
    if (rank := max(_ranks(config, folder))) > max_rank:
        raise AdapterMismatch(
            f"{folder}: rank {rank}; vLLM is started with --max-lora-rank {max_rank}, which follows trainer.lora_rank"
        )
    try:
        weights = safetensors.torch.load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterMismatch(
            f"{folder / ADAPTER_WEIGHTS}: {error}; save the adapter with safe_serialization=True"
        ) from error
    settings = settings.model_copy(update={"backend": "hf", "device": "cpu", "offload": False, "sharding": "none"})
    torch.set_num_threads(settings.threads)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = shared_base(model_path, settings, CPU)
        model = hf.adapted(base.modules(CPU), config, settings)
        rng = {"cpu": torch.get_rng_state()}
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    if strange := sorted(weights.keys() ^ own.keys()):
        raise AdapterMismatch(f"{folder}: not the layers of {model_path}: {strange[0]} is only in one of them")
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise AdapterMismatch(
                f"{folder}: {name} is {list(weight.shape)}, {model_path} has {list(own[name].shape)} there"
            )
        if not torch.isfinite(weight).all():
            raise AdapterMismatch(f"{folder}: {name} has numbers that are not finite")
    set_peft_model_state_dict(model, weights)
    return Learner(model, base, settings, rng, ALONE)


def _ranks(config: LoraConfig, folder: Path) -> list[int]:
    """Return the ranks that the config names."""
    try:
        return [operator.index(rank) for rank in (config.r, *config.rank_pattern.values())]
    except (TypeError, AttributeError) as error:
        raise AdapterMismatch(f"{folder / ADAPTER_CONFIG} has ranks that are no integers: {error}") from error


def _config(folder: Path) -> LoraConfig:
    path = folder / ADAPTER_CONFIG
    try:
        kind = json.loads(path.read_bytes())["peft_type"]
        if kind != "LORA":
            raise AdapterMismatch(f"{path}: {kind}, not LORA: vLLM serves nothing else")
        config = cast(LoraConfig, LoraConfig.from_pretrained(str(folder)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterMismatch(f"{path} cannot be read as peft writes it: {error!r}") from error
    if used := [name for name in NOT_SERVED if getattr(config, name, None)]:
        raise AdapterMismatch(f"{folder}: it uses {used[0]}, which vLLM does not serve; merge it into the base model")
    if config.bias != "none":
        raise AdapterMismatch(f"{folder}: it trains biases, which vLLM does not serve; merge it into the base model")
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
        raise AdapterMismatch(
            f"{folder}: init_lora_weights is {start}, which changes the base model; have peft convert it "
            "(path_initial_model_for_weight_conversion)"
        )
    config.init_lora_weights = True
    config.base_model_name_or_path = None  # peft warns of a name that is not a path; shapes are compared
    config.inference_mode = False
    return config
