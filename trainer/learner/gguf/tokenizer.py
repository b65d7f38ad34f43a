"""Build a tokenizer from a GGUF file's metadata.

transformers' own conversion of a byte-level BPE decodes spaces as `Ġ`.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.errors import ModelUnusable

CONTROL = 3
"""The type of control tokens in a GGUF file (`gguf.TokenType.CONTROL`)."""
SPLITTING = "smollm"
"""How text is split before the BPE: digits one by one, then as GPT-2 does (llama.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM)."""


def tokenizer_of(gguf: Path, template: str) -> PreTrainedTokenizerFast:
    """Return the file's tokenizer, with this chat template.

    Raises:
        ModelUnusable: the reader is not installed, the file is no GGUF file, or its tokenizer is of another kind.
    """
    fields = _fields(gguf)
    kind, splitting = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if (kind, splitting) != ("gpt2", SPLITTING):
        raise ModelUnusable(f"{gguf}: a tokenizer {kind!r} that splits as {splitting!r} cannot be converted")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    control = [
        token for token, of_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if of_type == CONTROL
    ]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        model_max_length=fields[f"{fields['general.architecture']}.context_length"],
        **special,
    )
    tokenizer.chat_template = template
    return tokenizer


def _fields(gguf: Path) -> dict[str, Any]:
    """Return the file's metadata.

    Raises:
        ModelUnusable: the reader is not installed, or the file is no GGUF file.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelUnusable("the package gguf is not installed; `whetstone models get` brings it along") from error
    try:
        return {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{gguf} is no GGUF file: {error}") from error
