"""Rows read together are read as each alone; and where a model cannot do that, it is seen and said."""

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

from trainer.domain.rows import Row, SampledCompletion, merge
from trainer.errors import ModelUnusable
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]
SETTINGS = TrainerSettings(threads=1, device="cpu", clip_norm=1e9)
"""Nothing is clipped, so the optimizer's first moment after one step is the gradient times 0.1."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
}


def gradient(model: Path, rows: list[Row], **settings: object) -> dict[str, Tensor]:
    """The gradient of a learner whose LoRA is not zero any more, by parameter name."""
    learner = Learner.fresh(model, SETTINGS.model_copy(update=settings), seed=1)
    for weight in learner._trained.values():  # B is zero at first, and with it the gradient of A
        torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(weight.numel()))
    learner.step(rows, 0)
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    return {name: m / 0.1 for name, m in state.items() if name.startswith("exp_avg.")}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any two entries, relative to the largest entry where that is below 1."""
    assert one.keys() == other.keys()
    largest = max(value.abs().max().item() for value in one.values())
    assert largest > 0
    return max((value - other[name]).abs().max().item() for name, value in one.items()) / min(1, largest)


@pytest.fixture
def group(make_rows: MakeRows) -> list[Row]:
    """A group of six that begins alike, and three rows of others."""
    rng = random.Random(3)
    prompt = tuple(rng.randrange(64) for _ in range(48))
    turns = []
    for member in range(6):
        said = tuple(rng.randrange(64) for _ in range(rng.randint(4, 20)))
        first = SampledCompletion("a", prompt, said, (-4.0,) * len(said), 0, 1.0)
        more = (*prompt, *said, *(rng.randrange(64) for _ in range(9)))
        second = SampledCompletion("b", more, said[:4], (-4.0,) * 4, 1, 0.7)
        turns += merge(f"t{member}", [first, second], rng.uniform(-1, 1))
    return turns + make_rows(3)


@pytest.mark.parametrize("loss", ["dppo_tv", "cispo", "dapo", "grpo", "dr_grpo", "gspo"])
def test_trees_leave_the_gradient_as_it_is(tiny_model: Path, group: list[Row], loss: str) -> None:
    alone = gradient(tiny_model, group, trees=False, micro_batch_tokens=64, loss=loss)
    for attention in ("segments", "dense"):
        together = gradient(tiny_model, group, attention=attention, loss=loss)
        assert furthest(alone, together) <= 1e-5


@pytest.mark.parametrize("budget", [64, 150, 8192])
def test_micro_batches_leave_the_gradient_as_it_is(tiny_model: Path, group: list[Row], budget: int) -> None:
    side_by_side = gradient(tiny_model, group, trees=False)
    assert furthest(side_by_side, gradient(tiny_model, group, micro_batch_tokens=budget)) <= 1e-5
    assert furthest(side_by_side, gradient(tiny_model, group[::-1], micro_batch_tokens=budget)) <= 1e-5


@pytest.mark.parametrize("loss", ["dppo_tv", "cispo", "dapo", "grpo"])
def test_forking_and_merging_leave_the_gradient_as_it_is(tiny_model: Path, loss: str) -> None:
    rng = random.Random(0)
    prompt, spoken = tuple(rng.randrange(64) for _ in range(20)), []
    for turn in range(4):
        said = tuple(rng.randrange(64) for _ in range(6))
        spoken.append(SampledCompletion(str(turn), prompt, said, (-4.0,) * 6, 0, 1.0))
        prompt = (*prompt, *said, *(rng.randrange(64) for _ in range(5)))
    merged = merge("t", spoken, 0.7)
    forked = [row for one in spoken for row in merge("t", [one], 0.7)]
    assert (len(merged), len(forked)) == (1, 4)
    for trees in (True, False):
        one = gradient(tiny_model, merged, loss=loss, trees=trees)
        assert furthest(one, gradient(tiny_model, forked, loss=loss, trees=trees)) <= 1e-5


@pytest.mark.parametrize("trees", [True, False])
def test_gradient_checkpointing_leaves_the_gradient_as_it_is(tiny_model: Path, group: list[Row], trees: bool) -> None:
    kept = gradient(tiny_model, group, trees=trees, gradient_checkpointing=False)
    again = gradient(tiny_model, group, trees=trees, gradient_checkpointing=True)
    assert furthest(kept, again) <= 1e-6


def test_what_is_shared_is_read_once(tiny_model: Path, group: list[Row]) -> None:
    def read(trees: bool) -> int:
        settings = SETTINGS.model_copy(update={"trees": trees})
        return Learner.fresh(tiny_model, settings, seed=1).step(group, 0).read_tokens

    tokens = sum(len(row.token_ids_T) for row in group)
    assert read(trees=True) == tokens - 5 * 48
    assert read(trees=False) >= tokens  # padding counts


def test_branches_that_both_sampled_what_they_share_are_both_trained(tiny_model: Path) -> None:
    said = tuple(range(40))
    rows = [
        row
        for name, last in (("a", 50), ("b", 51))
        for row in merge(
            name, [SampledCompletion(name, (1, 2), (*said, last), (-4.0,) * 41, 0, 1.0)], 0.5 if name == "a" else -0.2
        )
    ]
    figures = Learner.fresh(tiny_model, SETTINGS, seed=1).step(rows, 0)
    assert (figures.sampled_tokens, figures.read_tokens) == (82, 44)
    together, alone = gradient(tiny_model, rows), gradient(tiny_model, rows, trees=False)
    assert furthest(together, alone) <= 1e-5


def save(config: PretrainedConfig, folder: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL), Qwen2Config(**SMALL), Phi3Config(**SMALL, pad_token_id=0)],
    ids=lambda config: config.model_type,
)
def test_models_of_plain_attention_take_trees(tmp_path: Path, group: list[Row], config: PretrainedConfig) -> None:
    model = save(config, tmp_path / "base")
    assert Learner.fresh(model, SETTINGS, seed=1)._reading.trees
    assert furthest(gradient(model, group), gradient(model, group, trees=False)) <= 1e-5


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MistralConfig(**SMALL, sliding_window=16), "sliding_window"),
        (Gemma3TextConfig(**SMALL, sliding_window=16), "sliding_window"),
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "does not keep rows of one sequence apart"),
    ],
    ids=["window", "windows in some layers", "layers that are no attention"],
)
def test_models_that_cannot_take_trees_read_rows_side_by_side_and_say_so(
    tmp_path: Path, group: list[Row], caplog: pytest.LogCaptureFixture, config: PretrainedConfig, why: str
) -> None:
    model = save(config, tmp_path / "base")
    with caplog.at_level(logging.WARNING, logger="trainer.learner.forward"):
        learner = Learner.fresh(model, SETTINGS, seed=1)
    assert not learner._reading.trees
    assert why in caplog.text and "side by side" in caplog.text
    batched = gradient(model, group)
    assert furthest(batched, gradient(model, group, micro_batch_tokens=64)) <= 1e-5


def test_a_model_that_no_adapter_fits_is_a_clear_error(tmp_path: Path) -> None:
    model = save(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4), tmp_path / "base")
    with pytest.raises(ModelUnusable, match="takes no LoRA on all its linear layers"):
        Learner.fresh(model, SETTINGS, seed=1)


def test_positions_that_change_with_the_longest_row_are_refused_beyond_it(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    model = save(config, tmp_path / "base")
    with pytest.raises(ModelUnusable, match="set trainer.max_row_tokens to at most 64"):
        Learner.fresh(model, SETTINGS, seed=1)
    assert Learner.fresh(model, SETTINGS.model_copy(update={"max_row_tokens": 64}), seed=1)._reading.trees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_leak_of_a_single_layer_is_seen_in_any_precision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    config = Lfm2Config(**SMALL | {"num_hidden_layers": 8}, layer_types=["full_attention"] * 7 + ["conv"])
    model = save(config, tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(tmp_path / "low")
    with caplog.at_level(logging.WARNING, logger="trainer.learner.forward"):
        assert not Learner.fresh(tmp_path / "low", SETTINGS, seed=1)._reading.trees
    assert "one changes with what others say" in caplog.text


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_way_without_a_way_back_is_not_taken(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer.learner.forward"):
        learner = Learner.fresh(tiny_model, SETTINGS.model_copy(update={"attention": "flex"}), seed=1)
    assert not learner._reading.trees
    assert "cannot read several rows in one sequence (flex)" in caplog.text


def test_a_base_in_fp16_loses_no_small_gradients(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float16).save_pretrained(tmp_path / "fp16")
    settings = {"loss": "dr_grpo", "max_answer_tokens": 100_000}
    exact, half = (gradient(model, make_rows(8), **settings) for model in (tiny_model, tmp_path / "fp16"))
    one, other = (torch.cat([each[name].flatten() for name in sorted(exact)]) for each in (exact, half))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.999
