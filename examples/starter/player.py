"""Plays games with a model inside this process, all at once. Knows torch and the rules; no server, no training.

Every turn adds equally many tokens to every game (a legal answer is one token, a board nine), so the games share one
key-value cache without padding. A game that is over continues from its last tokens; nothing reads the result.
"""

import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "whetstone" / "demo" / "tictactoe"))

import game

SPLIT = "starter"
"""Prefix of these games' openings: neither a training nor a held-out game of the agent starts from one."""


@torch.inference_mode()
def play(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, games: int, seed: int = 0) -> Counter[str]:
    """How `games` games ended, at temperature 1: "X" (the agent won), "O", "draw" or "illegal"."""
    torch.manual_seed(seed)
    openings = [game.opening_name(SPLIT, seed, number) for number in range(games)]
    boards = [game.first_board(number, opening) for number, opening in enumerate(openings)]
    results: list[str | None] = [None] * games
    cache = DynamicCache()
    last_G2: list[list[int]] = []
    while None in results:
        tokens_GT = torch.tensor([turn(tokenizer, board, not last_G2) for board in boards])
        if last_G2:
            tokens_GT = torch.cat([torch.tensor(last_G2)[:, 1:], tokens_GT], dim=1)
        cells_G1 = sample(model, tokens_GT, cache)
        ends_G1 = sample(model, cells_G1, cache)
        last_G2 = torch.cat([cells_G1, ends_G1], dim=1).tolist()
        for i, (cell_id, end_id) in enumerate(last_G2):
            if results[i] is None:
                cell = tokenizer.decode([cell_id])
                if end_id == tokenizer.eos_token_id and cell in game.free(boards[i]):
                    boards[i] = game.after(boards[i], cell, openings[i])
                    results[i] = game.result(boards[i])
                else:
                    results[i] = "illegal"
    return Counter(result for result in results if result is not None)


def turn(tokenizer: PreTrainedTokenizerBase, board: str, first: bool) -> list[int]:
    """The token ids that show a board: a whole prompt for the first turn, later ones what follows `<|im_end|>`."""
    system = [{"role": "system", "content": game.SYSTEM}] if first else []
    messages = [*system, {"role": "user", "content": board}]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return list(tokenizer.encode(text if first else "\n" + text, add_special_tokens=False))


def sample(model: PreTrainedModel, tokens_GT: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """One sampled token for each row, shape (G, 1); the cache grows by T."""
    logits_GV = model(tokens_GT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return torch.multinomial(logits_GV.float().softmax(-1), 1)
