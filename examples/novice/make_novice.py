"""Make the novice: a tokenizer, a small Qwen3 and some minutes of pre-training on the formats of the examples.

Each example has a file here, which draws conversations: its format, and legal play at random. Nothing that is drawn
shows what is good to do. Needs no network; prints its progress, then the figures that README.md quotes.
"""

import argparse
import importlib
import json
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "starter"))

import make_starter

MODEL = Path(__file__).resolve().parent / "model"
FORMATS = ("board_2048", "mail", "temporal_clue", "codenames", "mcp_tools", "autorl")
"""The files that draw conversations."""
VOCABULARY = 1280
WIDTH, INTERMEDIATE = 192, 512
"""About 1.8M parameters."""
CONVERSATIONS = 12
"""Of each format in one batch."""


def kind_of(name: str) -> make_starter.formats.Kind:
    """Return what draws conversations of this format, called as its file is."""
    draw = importlib.import_module(name).conversation

    def kind(rng: random.Random) -> make_starter.formats.Conversation:
        conversation: make_starter.formats.Conversation = draw(rng)
        return conversation

    kind.__name__ = name
    return kind


def words_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of all formats, each with and without a space before it: all are single tokens."""
    words = {word for name in names for word in importlib.import_module(name).WORDS}
    return tuple(form for word in sorted(words) for form in (word, f" {word}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the novice: tokenizer, pre-training, figures.")
    parser.add_argument("--out", type=Path, default=MODEL, help="the folder to write")
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of every conversation")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="only these, to try something")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    names = tuple(args.formats)
    kinds = {kind_of(name): CONVERSATIONS for name in names}
    tokenizer = make_starter.make_tokenizer(rng, kinds, VOCABULARY, words_of(names))
    model = make_starter.make_model(tokenizer, WIDTH, INTERMEDIATE)
    make_starter.pretrain(model, tokenizer, rng, args.steps, kinds)
    make_starter.save(model, tokenizer, args.out)
    figures = {
        "parameters": model.num_parameters(),
        "vocabulary": len(tokenizer),
        "bytes": sum(file.stat().st_size for file in args.out.iterdir()),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
