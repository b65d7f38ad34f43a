"""Write the files of Qwen2.5 models without their weights: config.json, and safetensors that end after the header."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model, by the numbers of its config.json on the hub."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> dict[str, object]:
        """Return its config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors, by their names in the files."""
        size = self.hidden // self.heads
        queries, keys = self.heads * size, self.key_heads * size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            for name, width in (("q", queries), ("k", keys), ("v", keys)):
                shapes[f"{layer}.self_attn.{name}_proj.weight"] = (width, self.hidden)
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (width,)
            shapes[f"{layer}.self_attn.o_proj.weight"] = (self.hidden, queries)
            for name in ("gate", "up"):
                shapes[f"{layer}.mlp.{name}_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{layer}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}.{name}.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes


QWEN = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064, False),
}
"""Qwen2.5-…-Instruct by size."""


def write(folder: Path, size: str) -> Path:
    """Write the files of a size into a folder of its name below `folder`, and return that."""
    own = folder / f"Qwen2.5-{size}-Instruct"
    own.mkdir()
    shape = QWEN[size]
    (own / "config.json").write_text(json.dumps(shape.config()))
    header = {name: {"dtype": "BF16", "shape": of, "data_offsets": [0, 0]} for name, of in shape.tensors().items()}
    written = json.dumps(header).encode()
    (own / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written)
    return own
