"""Play the demo's games in process, many at once: its rules, openings and messages, without a server.

All games at the same turn are read together. A legal answer is one token and a board nine, so they share one key-value
cache without padding; equal prompts are read once.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from trainer.domain.claims import Member
from trainer.domain.rows import SampledCompletion

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "whetstone" / "demo" / "tictactoe"))

import game

Turn = tuple[tuple[int, ...], int, float]
"""Prompt, id of the answer, and its logprob in nats."""


@dataclass
class Game:
    """A game, and what was sampled in it."""

    name: str
    group: str
    opening: str
    board: str
    prompt: tuple[int, ...] = ()
    """Of the next turn."""
    read: int = 0
    place: int = 0
    """So many of the prompt's ids are in this row of the cache."""
    turns: list[Turn] = field(default_factory=list)
    won: bool = False

    def member(self, version: int) -> Member:
        """Return the game as a step's trajectory, as sampled by that version."""
        completions = tuple(
            SampledCompletion(f"{self.name}.{turn}", prompt, (answer,), (logprob,), version, 1.0, turn=turn)
            for turn, (prompt, answer, logprob) in enumerate(self.turns)
        )
        return Member(self.name, self.group, float(self.won), completions, reward_scale="tictactoe")


def games(split: str, seed: int, numbers: Iterable[int], group_size: int) -> list[Game]:
    """Return new games as the demo's agent numbers them: each `group_size` of them share an opening."""
    started = []
    for number in numbers:
        group = number // group_size
        opening = game.opening_name(split, seed, group)
        started.append(Game(f"{split}.{number}", f"{split}.{group}", opening, game.first_board(group, opening)))
    return started


class Player:
    """The model at temperature 1, with the adapter of a learner."""

    def __init__(self, model: Path, seed: int) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._base = {name: weight.detach().clone() for name, weight in self._model.named_parameters()}
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
        self._random = torch.Generator().manual_seed(seed)
        self._seen: dict[tuple[str, bool], tuple[int, ...]] = {}

    def load(self, files: Mapping[str, bytes]) -> None:
        """Take the adapter in `files` (`Learner.files`): W + (alpha / rank)·B·A."""
        config = json.loads(files["adapter_config.json"])
        adapter = safetensors.torch.load(files["adapter_model.safetensors"])
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                module = f"base_model.model.{name.removesuffix('.weight')}"
                if (a := adapter.get(f"{module}.lora_A.weight")) is not None:
                    b = adapter[f"{module}.lora_B.weight"]
                    weight.copy_(self._base[name] + config["lora_alpha"] / config["r"] * (b @ a))

    @torch.inference_mode()
    def play(self, games: Sequence[Game], greedy: bool = False) -> None:
        """Play the games to their ends. `greedy`: always the likeliest answer."""
        going, cache = list(games), DynamicCache()
        for one in going:
            one.prompt = self._shown(one.board, first=True)
        while going:
            unique = {one.prompt: one for one in going}
            if going[0].read:
                cache.batch_select_indices(torch.tensor([one.place for one in unique.values()]))
            ids_UT = torch.tensor([prompt[one.read :] for prompt, one in unique.items()])
            logits_UV = self._model(ids_UT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            places = {prompt: place for place, prompt in enumerate(unique)}
            logprobs_GV = logits_UV.float().log_softmax(-1)[[places[one.prompt] for one in going]]
            for one, (answer, logprob) in zip(going, self._answers(logprobs_GV, greedy), strict=True):
                one.turns.append((one.prompt, answer, logprob))
                one.place, one.read = places[one.prompt], len(one.prompt)
            going = [one for one in going if self._goes_on(one)]

    def _answers(self, logprobs_GV: Tensor, greedy: bool = False) -> list[tuple[int, float]]:
        """Return an answer from each distribution, with its logprob in nats."""
        sampled_G1 = torch.multinomial(logprobs_GV.exp(), 1, generator=self._random)
        answers_G1 = logprobs_GV.argmax(-1, keepdim=True) if greedy else sampled_G1
        logprobs_G = logprobs_GV.gather(1, answers_G1)[:, 0].clamp(max=0.0)
        return list(zip(answers_G1[:, 0].tolist(), logprobs_G.tolist(), strict=True))

    def _goes_on(self, one: Game) -> bool:
        """Move as the last answer says; return whether the game goes on."""
        answer = one.turns[-1][1]
        cell = self._tokenizer.decode([answer])
        if cell not in game.free(one.board):
            return False
        one.board = game.after(one.board, cell, one.opening)
        if (winner := game.result(one.board)) is not None:
            one.won = winner == "X"
            return False
        one.prompt = (*one.prompt, answer, *self._shown(one.board, first=False))
        return True

    def _shown(self, board: str, *, first: bool) -> tuple[int, ...]:
        """Return the ids that show a board: the whole first prompt, or what follows an answer."""
        if (board, first) not in self._seen:
            system = [{"role": "system", "content": game.SYSTEM}] if first else []
            messages = [*system, {"role": "user", "content": board}]
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            ids = self._tokenizer.encode(text if first else f"<|im_end|>\n{text}", add_special_tokens=False)
            self._seen[board, first] = tuple(ids)
        return self._seen[board, first]
