"""The novice: what its formats draw, and that the committed model knows them and nothing about what is good."""

import importlib
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES / "novice"))

make_novice = importlib.import_module("make_novice")
make_starter = make_novice.make_starter
tokenizer = AutoTokenizer.from_pretrained(make_novice.MODEL)
WITH_CHOICES = ("board_2048", "mcp_tools", "autorl")
"""Formats in which the first token of each answer is drawn."""


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(make_novice.MODEL, dtype=torch.float32).eval()


def test_the_folder_is_under_8_mb_and_needs_no_pickle() -> None:
    files = {file.name: file.stat().st_size for file in make_novice.MODEL.iterdir()}
    assert sum(files.values()) < 8_000_000
    assert {Path(name).suffix for name in files} <= {".json", ".jinja", ".safetensors"}


def test_every_word_of_the_examples_is_one_token_with_and_without_a_space() -> None:
    for word in make_novice.words_of(make_novice.FORMATS):
        ids = tokenizer.encode(word, add_special_tokens=False)
        assert len(ids) == 1 and tokenizer.decode(ids) == word
        inside = f"of{word} {word.strip()} ," if word[0] == " " else f"\n{word} ,"
        assert ids[0] in tokenizer.encode(inside, add_special_tokens=False)


@pytest.mark.slow
def test_the_committed_tokenizer_and_template_are_what_the_script_makes() -> None:
    kinds = {make_novice.kind_of(name): make_novice.CONVERSATIONS for name in make_novice.FORMATS}
    words = make_novice.words_of(make_novice.FORMATS)
    made = make_starter.make_tokenizer(random.Random(0), kinds, make_novice.VOCABULARY, words)
    assert made.get_vocab() == tokenizer.get_vocab()
    assert tokenizer.chat_template == made.chat_template


@pytest.mark.parametrize("name", make_novice.FORMATS)
def test_a_format_draws_the_same_conversations_for_the_same_seed_and_they_are_short(name: str) -> None:
    draw = make_novice.kind_of(name)
    lengths = []
    for number in range(100):
        conversation = draw(random.Random(number))
        assert conversation == draw(random.Random(number))
        assert conversation.messages[-1]["role"] == "assistant"
        lengths.append(len(tokenizer.encode(make_starter.render(tokenizer, conversation))))
    assert max(lengths) <= 200


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CHOICES)
def test_the_novice_answers_legally_and_no_choice_is_preferred(name: str, model: Any) -> None:
    """Compared by entropy, in nats, with a uniform choice among the legal first tokens."""
    rng, legal, entropies = random.Random(-1), [], []
    draw = make_novice.kind_of(name)
    for _ in range(100):
        conversation = draw(rng)
        texts = list(conversation.messages[:-1])
        prompt = tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
        ids = [make_starter.id_of(tokenizer, word) for word in dict.fromkeys(conversation.choices[-1])]
        with torch.inference_mode():
            logits_V = model(torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])).logits[0, -1]
        shares = logits_V.double().softmax(-1)[ids]
        legal.append(float(shares.sum()))
        if len(ids) > 1:
            chosen = shares / shares.sum()
            entropies.append(float(-(chosen * chosen.log()).sum()) / math.log(len(ids)))
    assert sum(legal) / len(legal) > 0.85
    assert sum(entropies) / len(entropies) > 0.8
