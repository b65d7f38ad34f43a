"""The demo's curve in process: its games are the agent's, its steps are the trainer's."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.games.__main__ import STARTER, Run, settings_of
from benchmarks.learning.games.player import Player, game, games
from whetstone.config.settings import SettingsError


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32).eval()


@torch.inference_mode()
def test_each_turn_has_the_prompt_of_the_agents_messages_and_the_models_own_logprob(model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    played = games("eval", 3, range(6), group_size=1)
    Player(STARTER, seed=1).play(played)
    for number, one in enumerate(played):
        opening = game.opening_name("eval", 3, number)
        board, outcome = game.first_board(number, opening), None
        messages = [{"role": "system", "content": game.SYSTEM}]
        for prompt, answer, logprob in one.turns:
            assert outcome is None
            messages.append({"role": "user", "content": board})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert list(prompt) == ids
            logprobs_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert logprob == pytest.approx(logprobs_V[answer].item(), abs=1e-4)
            cell = tokenizer.decode([answer])
            messages.append({"role": "assistant", "content": cell})
            if cell in game.free(board):
                board = game.after(board, cell, opening)
                outcome = game.result(board)
            else:
                outcome = "illegal"
        assert outcome is not None and one.won == (outcome == "X")


def test_the_same_groups_have_the_same_openings_and_others_have_others() -> None:
    openings = [one.opening for one in games("train", 0, range(4), group_size=2)]
    assert openings == [game.opening_name("train", 0, group) for group in (0, 0, 1, 1)]


def test_a_step_moves_the_player_to_the_new_version() -> None:
    few = ["groups_per_step=2", "learning_rate=0.05", "baseline=state"]
    run = Run(STARTER, settings_of(few, seed=0), group_size=4)
    before = run.held_out(30, greedy=True)
    figures = run.step(0)
    assert run.played >= 8 and 0 < figures["reward"] < 1 and figures["norm"] > 0
    assert run.held_out(30, greedy=True) != before


def test_a_setting_that_the_trainer_does_not_have_is_refused() -> None:
    with pytest.raises(SettingsError, match="lora_rank"):
        settings_of(["lora_rnk=3"], seed=0)
