import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.adapters import files as adapter
from trainer.domain.rows import Answer, Row
from trainer.errors import AdapterMismatch, ModelUnusable, NotFinite, RowError
from trainer.learner.learner import Learner
from trainer.learner.merged import in_bf16
from whetstone.config.trainer import TrainerSettings
from whetstone.registry.adapters import WEIGHTS, AdapterDamaged
from whetstone.registry.remote.cache import pull
from whetstone.registry.remote.object_store import ObjectStore

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(threads=1, device="cpu", clip_norm=1e9)
"""Nothing is clipped, so the optimizer's first moment after one step is the gradient times 0.1."""


def gradient(learner: Learner, rows: list[Row]) -> dict[str, Tensor]:
    """The gradient of a fresh learner's first step, by parameter name."""
    learner.step(rows, 0)
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    return {name.removeprefix("exp_avg."): m / 0.1 for name, m in state.items() if name.startswith("exp_avg.")}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    assert any(value.abs().max() > 1e-4 for value in one.values())
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= tolerance, name


def moved(model: Path, settings: TrainerSettings, rows: list[Row]) -> Learner:
    """A learner whose LoRA does something: B is zero at first."""
    learner = Learner.fresh(model, settings, seed=1)
    learner.step(rows, 0)
    return learner


def test_the_gradient_is_that_of_the_whole_models_loss_written_out(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(6)
    ours = gradient(Learner.fresh(tiny_model, SETTINGS, seed=1), rows)

    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    model = learner._model  # the same weights, but a forward pass and a loss of our own
    tokens = sum(sum(row.sampled_T) for row in rows)
    total = torch.zeros(())
    for row in rows:
        logits_TV = model(input_ids=torch.tensor([row.token_ids_T])).logits[0]
        for place, sampled in enumerate(row.sampled_T):
            if sampled:
                log_pi = (logits_TV[place - 1] / row.temperatures_T[place]).log_softmax(-1)[row.token_ids_T[place]]
                log_mu = torch.tensor(row.inference_logprobs_T[place])
                moved_by = log_pi.exp() - log_mu.exp()
                assert abs(moved_by) < 0.2
                total = total - (log_pi - log_mu).exp() * row.advantages_T[place] + 1e-3 * moved_by**2
    (total / tokens).backward()
    theirs = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert_same(ours, theirs, 1e-5)


def test_splitting_into_micro_batches_changes_nothing(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(12)
    together = gradient(Learner.fresh(tiny_model, SETTINGS, seed=1), rows)
    alone = SETTINGS.model_copy(update={"micro_batch_tokens": 64})  # every row on its own, without any padding
    assert_same(together, gradient(Learner.fresh(tiny_model, alone, seed=1), rows), 1e-5)


def test_padding_changes_nothing(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(4) + make_rows(1, seed=9, shortest=200, longest=200)
    padded = gradient(Learner.fresh(tiny_model, SETTINGS, seed=1), rows)
    alone = SETTINGS.model_copy(update={"micro_batch_tokens": 64})
    assert_same(padded, gradient(Learner.fresh(tiny_model, alone, seed=1), rows), 1e-5)


def test_the_order_of_rows_changes_nothing(tiny_model: Path, make_rows: MakeRows) -> None:
    rows = make_rows(8)
    one = gradient(Learner.fresh(tiny_model, SETTINGS, seed=1), rows)
    assert_same(one, gradient(Learner.fresh(tiny_model, SETTINGS, seed=1), rows[::-1]), 1e-5)


def test_a_resumed_learner_takes_the_same_step_bit_for_bit(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows
) -> None:
    settings = TrainerSettings(threads=2, device="cpu", micro_batch_tokens=256)
    undisturbed = Learner.fresh(tiny_model, settings, seed=3)
    for step in (1, 2):
        undisturbed.step(make_rows(8, seed=step), step)
    adapter.write(tmp_path / "p@v2", undisturbed, parent=1, step=2)
    resumed = Learner.resume(tiny_model, tmp_path / "p@v2", settings)
    assert resumed.files() == undisturbed.files()

    torch.manual_seed(99)  # the process's RNG is not the learner's
    figures = [learner.step(make_rows(8, seed=3), 1) for learner in (undisturbed, resumed)]
    assert figures[0] == figures[1]
    assert resumed.files() == undisturbed.files()


def test_a_fresh_learner_can_be_written_and_resumed(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    fresh = Learner.fresh(tiny_model, SETTINGS, seed=3)
    adapter.write(tmp_path / "p@v1", fresh, parent=0, step=1)
    resumed = Learner.resume(tiny_model, tmp_path / "p@v1", SETTINGS)
    assert resumed.step(make_rows(4), 0) == fresh.step(make_rows(4), 0)
    assert resumed.files() == fresh.files()


def test_the_same_seed_makes_the_same_adapter_and_another_another(tiny_model: Path) -> None:
    adapters = [Learner.fresh(tiny_model, SETTINGS, seed).files()["adapter_model.safetensors"] for seed in (1, 1, 2)]
    assert adapters[0] == adapters[1] != adapters[2]


def test_the_processes_rng_is_left_alone(tiny_model: Path, make_rows: MakeRows) -> None:
    before = torch.get_rng_state()
    moved(tiny_model, SETTINGS, make_rows(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_adapter_speaks_the_same_when_peft_loads_it(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    learner = moved(tiny_model, SETTINGS, make_rows(8))
    adapter.write(tmp_path / "p@v1", learner, parent=0, step=1)
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    prompt, tokens = [1, 2, 3], [4, 5, 6]
    with torch.no_grad():
        untrained = base(input_ids=torch.tensor([prompt + tokens])).logits[0, 2:-1].log_softmax(-1)
        loaded = PeftModel.from_pretrained(base, tmp_path / "p@v1")
        trained = loaded(input_ids=torch.tensor([prompt + tokens])).logits[0, 2:-1].log_softmax(-1)
    spoken = torch.tensor(learner.logprobs(prompt, tokens))
    torch.testing.assert_close(spoken, trained[range(3), tokens], rtol=0, atol=1e-5)
    assert (spoken - untrained[range(3), tokens]).abs().max() > 1e-3


def test_the_adapter_has_every_linear_layer_no_head_and_no_path(tiny_model: Path) -> None:
    files = Learner.fresh(tiny_model, SETTINGS, seed=1).files()
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "tiny-qwen3"
    assert config["modules_to_save"] is None
    assert str(tiny_model.parent) not in files["adapter_config.json"].decode()
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in config["target_modules"]} == layers
    weights = safetensors.torch.load(files["adapter_model.safetensors"])
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert {name.split(".")[-3] for name in weights} == layers
    assert len(weights) == 2 * 2 * len(layers)


def test_a_base_in_bf16_gets_an_adapter_in_fp32(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    folder = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(folder)
    learner = moved(folder, SETTINGS, make_rows(4))
    weights = safetensors.torch.load(learner.files()["adapter_model.safetensors"])
    assert {value.dtype for value in weights.values()} == {torch.float32}


def test_figures_say_what_the_step_was(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    rows = make_rows(8)
    versions = [version for row in rows for version in row.versions_T if version >= 0]
    first = learner.step(rows, version_in=1)
    assert first.sampled_tokens == len(versions)
    assert first.fresh_share == pytest.approx(versions.count(1) / len(versions))
    assert first.kl == 0.0  # the LoRA does nothing yet
    assert 3.5 < first.entropy < 4.2  # random weights: close to log 64
    assert first.masked_share == 0.0
    assert first.grad_norm > 0
    assert first.mismatch_k3 is not None
    assert learner.step(rows, version_in=1).kl > 0
    assert learner.step(rows, version_in=7).mismatch_k3 is None


def test_what_the_server_said_of_its_own_version_is_no_mismatch(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = moved(tiny_model, SETTINGS, make_rows(4))
    (row,) = make_rows(1, seed=5)
    said = [math.nan, *learner.logprobs(row.token_ids_T[:1], row.token_ids_T[1:])]
    own = replace(
        row,
        inference_logprobs_T=tuple(said),
        versions_T=tuple(4 if sampled else -1 for sampled in row.sampled_T),
        temperatures_T=(1.0,) * len(said),
    )
    figures = learner.step([own], version_in=4)
    assert figures.mismatch_k3 == pytest.approx(0.0, abs=1e-9)
    assert figures.fresh_share == 1.0
    assert figures.effective_share == pytest.approx(1.0)


def test_one_token_that_became_likelier_leaves_fewer_effective_ones(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = moved(tiny_model, SETTINGS, make_rows(4))
    (row,) = make_rows(1, seed=5)
    logprobs = [math.nan, *learner.logprobs(row.token_ids_T[:1], row.token_ids_T[1:])]
    logprobs[row.sampled_T.index(True)] -= math.log(3)
    figures = learner.step(
        [replace(row, inference_logprobs_T=tuple(logprobs), temperatures_T=(1.0,) * len(logprobs))], 4
    )
    others = sum(row.sampled_T) - 1
    assert figures.effective_share == pytest.approx((3 + others) ** 2 / (9 + others) / (1 + others))


def test_tokens_that_have_moved_too_far_are_counted_as_masked(tiny_model: Path, make_rows: MakeRows) -> None:
    (row,) = make_rows(1)
    surely = tuple(-0.01 if sampled else math.nan for sampled in row.sampled_T)
    pushed_down = (-1.0,) * len(surely)
    row = replace(
        row, inference_logprobs_T=surely, advantages_T=pushed_down
    )  # μ is nearly 1, π is not: far down already
    figures = Learner.fresh(tiny_model, SETTINGS, seed=1).step([row], version_in=0)
    assert figures.masked_share == 1.0


def test_a_loss_that_is_not_finite_moves_nothing(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = moved(tiny_model, SETTINGS, make_rows(4))
    before = learner.files()
    good, bad = make_rows(2, seed=4)
    bad = replace(bad, advantages_T=(3e38,) * len(bad.token_ids_T))
    with pytest.raises(NotFinite, match="the step was not taken"):
        learner.step([good, bad], version_in=0)
    assert learner.files() == before

    other = moved(tiny_model, SETTINGS, make_rows(4))
    assert learner.step([good], 0) == other.step([good], 0)  # no gradient of the failed step is left either


def test_progress_is_told_after_every_micro_batch_and_may_end_the_step(tiny_model: Path, make_rows: MakeRows) -> None:
    settings = SETTINGS.model_copy(update={"micro_batch_tokens": 128})
    learner = Learner.fresh(tiny_model, settings, seed=1)
    told: list[tuple[int, int]] = []
    learner.step(make_rows(6), 0, lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]

    class LeaseLost(Exception):
        pass

    def lose(done: int, total: int) -> None:
        if done == total:
            raise LeaseLost

    before = learner.files()
    with pytest.raises(LeaseLost):
        learner.step(make_rows(6), 0, lose)
    assert learner.files() == before


def test_rows_without_sampled_tokens_are_no_step(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    (row,) = make_rows(1)
    unsampled = replace(row, sampled_T=(False,) * len(row.sampled_T))
    for rows in ([], [unsampled]):
        with pytest.raises(RowError, match="nothing to learn from"):
            learner.step(rows, 0)
    with pytest.raises(RowError, match="nothing predicts"):
        learner.step([replace(row, sampled_T=(True,) * len(row.sampled_T))], 0)
    with pytest.raises(RowError, match="a prompt"):
        learner.logprobs([], [1])


def test_a_damaged_adapter_is_not_resumed(tmp_path: Path, tiny_model: Path) -> None:
    adapter.write(tmp_path / "p@v1", Learner.fresh(tiny_model, SETTINGS, seed=1), parent=0, step=1)
    path = tmp_path / "p@v1" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterDamaged, match="optimizer.safetensors"):
        Learner.resume(tiny_model, tmp_path / "p@v1", SETTINGS)


def test_a_doubled_lora_moves_the_logprobs_twice_as_far_and_is_itself_again_afterwards(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS.model_copy(update={"learning_rate": 1e-4}), seed=1)
    learner.step(make_rows(4), 0)
    before = dict(learner.files())
    answers = [Answer("", (1, 2, 3, place), (7, 9, 11)) for place in range(6)]
    own, alone = learner.logprobs_of(answers), [learner.logprobs(one.prompt_ids, one.token_ids) for one in answers]
    assert torch.allclose(torch.tensor(own), torch.tensor(alone), atol=1e-5)
    with learner.doubled():
        doubled = learner.logprobs_of(answers)
    with learner.as_version(None):
        base = learner.logprobs_of(answers)
    once, twice = torch.tensor(own) - torch.tensor(base), torch.tensor(doubled) - torch.tensor(base)
    assert once.abs().max() > 1e-3 and torch.allclose(twice, 2 * once, atol=0.1 * once.abs().max().item())
    assert dict(learner.files()) == before and learner.logprobs_of(answers) == own


def test_an_adapter_whose_optimizer_state_was_removed_goes_on_with_new_moments(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    learner.step(make_rows(4), 0)
    adapter.write(tmp_path / "p@v1", learner, parent=0, step=1)
    (tmp_path / "p@v1" / "optimizer.safetensors").unlink()
    resumed = Learner.resume(tiny_model, tmp_path / "p@v1", SETTINGS)
    assert "p@v1 has no optimizer state any more" in caplog.text
    assert resumed.files()["adapter_model.safetensors"] == learner.files()["adapter_model.safetensors"]
    resumed.step(make_rows(4), 1)
    state = safetensors.torch.load(resumed.files()["optimizer.safetensors"])
    assert {value.item() for name, value in state.items() if name.startswith("step.")} == {1.0}


def test_a_pulled_adapter_has_the_weights_in_bf16_and_goes_on_with_new_moments(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows
) -> None:
    learner = moved(tiny_model, SETTINGS, make_rows(4))
    whole, pulled = tmp_path / "p@v1", tmp_path / "pulled"
    sha256 = adapter.write(whole, learner, parent=0, step=1, in_bf16=in_bf16)
    store = ObjectStore(f"file://{tmp_path}/store", 60)
    store.publish(whole)
    pull(store, sha256, pulled)
    rounded = safetensors.torch.load_file(pulled / WEIGHTS)
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    for name, tensor in safetensors.torch.load_file(whole / WEIGHTS).items():
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16))
    resumed = Learner.resume(tiny_model, pulled, SETTINGS)
    near, own = resumed.logprobs([1, 2, 3], [4, 5]), learner.logprobs([1, 2, 3], [4, 5])
    assert near == pytest.approx(own, abs=0.05) and near != own
    assert Learner.resume(tiny_model, whole, SETTINGS).logprobs([1, 2, 3], [4, 5]) == own
    resumed.step(make_rows(4), 1)


def test_an_adapter_of_another_base_model_or_shape_is_not_resumed(tmp_path: Path, tiny_model: Path) -> None:
    adapter.write(tmp_path / "p@v1", Learner.fresh(tiny_model, SETTINGS, seed=1), parent=0, step=1)
    with pytest.raises(AdapterMismatch, match="rank 16 and alpha 32; the settings say 8 and 32"):
        Learner.resume(tiny_model, tmp_path / "p@v1", SETTINGS.model_copy(update={"lora_rank": 8}))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(AdapterMismatch, match="weights_sha256"):
        Learner.resume(tmp_path / "other", tmp_path / "p@v1", SETTINGS)


def test_a_model_that_cannot_be_loaded_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnusable, match=tmp_path.name):
        Learner.fresh(tmp_path, SETTINGS, seed=1)


def test_one_token_that_the_server_all_but_excluded_does_not_make_the_mismatch_infinite(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    (row,) = make_rows(1)
    hardly = tuple(-95.0 if sampled else math.nan for sampled in row.sampled_T)
    fresh = tuple(1 if sampled else -1 for sampled in row.sampled_T)
    figures = Learner.fresh(tiny_model, SETTINGS, seed=1).step(
        [replace(row, inference_logprobs_T=hardly, versions_T=fresh)], version_in=1
    )
    assert figures.masked_share == 1.0
    assert figures.mismatch_k3 is not None and SETTINGS.max_ratio < figures.mismatch_k3 < 1000
