"""Makes the starter model: a tokenizer, a tiny Qwen3 and a few minutes of supervised pre-training, all from a seed.

Knows torch and transformers; what the conversations say stands in formats.py, how they are rendered in the model's own
chat_template.jinja.
Needs no network. Prints its progress, then the figures that README.md quotes.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import formats
import player
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

MODEL = Path(__file__).resolve().parents[2] / "whetstone" / "starter"
VOCABULARY = 512
POSITIONS = 2048
HEAD = 32
"""Dimensions of an attention head."""
LEARNING_RATE = 2e-3
SEEN_AFTER = 3
"""Layers, of four, after which the model is to know what is on a board. The last is left for what to do about it."""
SEEING = ((250, 9.0), (200, 1.0), (150, 0.5))
"""Steps of the stages in which it learns that, and what it weighs in their loss: first it is to see, as a sum over nine
cells, and then to play legally again as well."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = tuple(f"<{close}{name}>" for name in ("think", "tools", "tool_call", "tool_response") for close in ("", "/"))
"""One token each, as in Qwen3; unlike the control tokens they are text, so decoding keeps them."""
WORDS = r"\n| ?[A-Z]?[a-z]+| ?[A-Z]|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
"""What may become one token. A newline, a digit and a lone capital always stand alone: a board is nine tokens, and
nothing merges across the newline between a role and what it says."""


def make_tokenizer(
    rng: random.Random,
    kinds: dict[formats.Kind, int] = formats.KINDS,
    vocabulary: int = VOCABULARY,
    words: Sequence[str] = (),
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE trained on 3,000 conversations, with the chat template. Each of `words` is one token."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), byte_level])
    backend.decoder = decoders.ByteLevel()
    drawn = [kind for kind, share in kinds.items() for _ in range(share)]
    renderer = wrap(backend)
    pieces = re.compile("|".join(map(re.escape, CONTROL + MARKUP)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKUP) - len(words),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (render(renderer, rng.choice(drawn)(rng)) for _ in range(3000))
    backend.train_from_iterator((piece for text in texts for piece in pieces.split(text)), trainer)
    tokenizer = wrap(backend)
    tokenizer.add_tokens(list(MARKUP))
    # Of a word behind a space the beginning is no boundary of a word: what stands before the space is one.
    tokenizer.add_tokens([AddedToken(word, single_word=word[0] != " ", normalized=False) for word in words])
    return tokenizer


def wrap(backend: Tokenizer) -> PreTrainedTokenizerBase:
    """The tokenizer as transformers and vLLM load it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=(MODEL / "chat_template.jinja").read_text(),
    )


def render(tokenizer: PreTrainedTokenizerBase, conversation: formats.Conversation) -> str:
    """The conversation's text, control tokens included."""
    tools = list[dict[Any, Any] | Callable[..., Any]](conversation.tools) or None
    return str(tokenizer.apply_chat_template(conversation.messages, tools=tools, tokenize=False))


def make_model(tokenizer: PreTrainedTokenizerBase, width: int = 128, intermediate: int = 384) -> Qwen3ForCausalLM:
    """Return a Qwen3, freshly initialised: with the defaults of about 0.85M parameters.

    The initial spread suits a width of 128, and the low rotary base suits prompts of tens of tokens, in which a cell
    is found by its distance: with Qwen3's defaults (0.02 and 10,000 or more) the loss falls later.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=width // HEAD,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        initializer_range=0.07,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def batch(
    tokenizer: PreTrainedTokenizerBase, conversations: list[formats.Conversation]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Conversations of one kind as token ids (B, T), padded on the right; which of them the assistant wrote (B, T), its
    `<|im_end|>` included; and what each of these N tokens should have been, as probabilities (N, V)."""
    texts = [render(tokenizer, conversation) for conversation in conversations]
    ids_BT = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")["input_ids"]
    opening = torch.tensor(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    assistant_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    firsts = []
    for row, start in (ids_BT.unfold(1, len(opening), 1) == opening).all(-1).nonzero().tolist():
        first = start + len(opening)
        length = int((ids_BT[row, first:] == tokenizer.eos_token_id).nonzero()[0]) + 1
        firsts.append(int(assistant_BT.sum()))
        assistant_BT[row, first : first + length] = True
    targets_NV = torch.nn.functional.one_hot(ids_BT[assistant_BT], len(tokenizer)).float()
    choices = [words for conversation in conversations for words in conversation.choices or _no_choices(conversation)]
    for first, words in zip(firsts, choices, strict=True):
        if words:
            targets_NV[first] = 0
            targets_NV[first, [id_of(tokenizer, word) for word in words]] = 1 / len(words)
    return ids_BT, assistant_BT, targets_NV


def id_of(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    """Return the id of a word that is one token.

    Raises:
        ValueError: it is several.
    """
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens: it has to be one")
    return ids[0]


def _no_choices(conversation: formats.Conversation) -> list[list[str]]:
    return [[] for message in conversation.messages if message["role"] == "assistant"]


class BoardReader(torch.nn.Module):
    """Tells what is on a board from what the model knows of it when it is to answer: a linear map, used in pre-training
    only. It is what makes the model see lines; from a few answers it would take many times as many games."""

    def __init__(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.read = torch.nn.Linear(model.config.hidden_size, len(formats.facts(formats.game.EMPTY)))
        self._opening = torch.tensor(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        self._hidden_BTH = torch.empty(0)
        self.hook = model.model.layers[SEEN_AFTER - 1].register_forward_hook(self._keep)

    def _keep(self, _layer: torch.nn.Module, _inputs: Any, hidden_BTH: torch.Tensor) -> None:
        self._hidden_BTH = hidden_BTH

    def loss(self, ids_BT: torch.Tensor, conversations: list[formats.Conversation]) -> torch.Tensor:
        """Binary cross-entropy over all facts of all boards, after the model's forward pass over the conversations."""
        rows, starts = (ids_BT.unfold(1, len(self._opening), 1) == self._opening).all(-1).nonzero(as_tuple=True)
        boards = [m["content"] for one in conversations for m in one.messages if m["role"] == "user"]
        facts_NF = torch.tensor([formats.facts(board) for board in boards])
        logits_NF = self.read(self._hidden_BTH[rows, starts + len(self._opening) - 1])
        return torch.nn.functional.binary_cross_entropy_with_logits(logits_NF, facts_NF)


def pretrain(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    steps: int,
    kinds: dict[formats.Kind, int],
    reader: BoardReader | None = None,
) -> None:
    """Cross-entropy on what the assistant says, and with a reader on what is on the boards that it sees; each kind of
    conversation weighs the same in a step."""
    weights = [*model.parameters(), *(reader.parameters() if reader else ())]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    started, tokens = time.monotonic(), 0
    model.train()
    for step in range(steps):
        losses: dict[str, float] = {}
        for kind, conversations in kinds.items():
            drawn = [kind(rng) for _ in range(conversations)]
            ids_BT, assistant_BT, targets_NV = batch(tokenizer, drawn)
            hidden_BTH = model.model(ids_BT).last_hidden_state
            logits_NV = model.lm_head(hidden_BTH[:, :-1][assistant_BT[:, 1:]])
            loss = torch.nn.functional.cross_entropy(logits_NV, targets_NV)
            losses[kind.__name__] = loss.item()
            if reader and kind in formats.BOARDS:
                seen = reader.loss(ids_BT, drawn)
                losses["boards"] = seen.item()
                loss = loss + reader.weight * seen
            loss.backward()
            tokens += ids_BT.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            speed = tokens / (time.monotonic() - started)
            shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {step:4}/{steps}  {shown}  {speed:,.0f} tokens/s", flush=True)
    model.eval()


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The files vLLM and transformers load; the weights in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the starter model: tokenizer, pre-training, figures.")
    parser.add_argument("--out", type=Path, default=MODEL, help="the folder to write")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the first stage")
    parser.add_argument("--first", type=Path, help="the folder of the first stage, which is then left out")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of every conversation")
    parser.add_argument("--games", type=int, default=2000, help="games played to measure the result")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = make_tokenizer(rng)
    if args.first:
        model = Qwen3ForCausalLM.from_pretrained(args.first, dtype=torch.float32)
    else:
        model = make_model(tokenizer)
        pretrain(model, tokenizer, rng, args.steps, formats.KINDS)
    half = {kind: count // 2 for kind, count in formats.KINDS.items()}
    for steps, weight in SEEING:
        reader = BoardReader(model, tokenizer, weight)
        pretrain(model, tokenizer, rng, steps, half, reader)
        reader.hook.remove()
    save(model, tokenizer, args.out)
    seconds = time.monotonic() - started
    ended = player.play(model, tokenizer, args.games)
    figures = {
        "parameters": model.num_parameters(),
        "bytes": sum(file.stat().st_size for file in args.out.iterdir()),
        "seconds": round(seconds),
        "games": args.games,
        **{f"share_{name}": round(ended[name] / args.games, 4) for name in ("X", "O", "draw", "illegal")},
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
