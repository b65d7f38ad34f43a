"""Models on cards: the plan is what the arithmetic of the weights says, and what does not fit is told what would."""

from typing import Any

import pytest

from benchmarks.memory.shapes import QWEN, write
from whetstone.config.settings import Settings
from whetstone.memory import plan
from whetstone.memory.model_files import ModelSizes, of_folder
from whetstone.memory.plan import Hardware, Mode, Plan
from whetstone.memory.serving import GIB
from whetstone.memory.training import step_bytes

MODES: dict[str, Mode] = {"shared": "asleep", "own": "own"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSizes]:
    folder = tmp_path_factory.mktemp("models")
    return {size: of_folder(write(folder, size)) for size in QWEN}


def planned(model: ModelSizes, gib: float, mode: Mode = "own", **settings: Any) -> Plan:
    return plan.make(model, Settings(**settings), Hardware(int(gib * GIB), mode))


# GiB of weights: 0.9, 2.9, 14.2, 27.5, 61.0. vLLM has those beside 2.2 GiB of work (4 on a card of 80) and what its
# LoRA slots take (0.5, 0.8, 1.6 GiB from 7B on); a step has them beside its adapter (0.6, 1.0, 2.0 GiB) and 0.7, 1.0 or
# 1.3 MiB a token. So 14B needs more than 30 GiB on each card, and 32B more than 64.
SMALLEST_CARD = {"0.5B": 24, "1.5B": 24, "7B": 24, "14B": 48, "32B": 80}


@pytest.mark.parametrize("card", MODES)
@pytest.mark.parametrize("gib", [24, 48, 80])
@pytest.mark.parametrize("size", SMALLEST_CARD)
def test_what_fits_is_what_the_weights_say(models: dict[str, ModelSizes], size: str, gib: int, card: str) -> None:
    fits = gib >= SMALLEST_CARD[size]
    one = planned(models[size], gib, MODES[card])
    assert one.fits is fits, one.why_not
    if fits:
        gets = one.utilisation * gib * GIB
        assert one.server.weights + one.server.adapters + one.server.work + one.server.kv_cache <= gets
        assert one.server.kv_tokens >= one.context >= 20_000 and one.row == 8192
        assert one.step.total <= one.trainer_bytes < gib * GIB
    else:
        assert "What would fit: " in one.why_not and f"of a card of {gib} GiB" in one.why_not


def test_a_sharded_base_counts_as_its_share_and_what_is_gathered_at_once(models: dict[str, ModelSizes]) -> None:
    model, trains = models["14B"], Hardware(24 * GIB, "own", serves=False)
    whole = plan.make(model, Settings(), trains)
    assert not whole.fits and 'trainer.processes = 2, trainer.sharding = "fsdp"' in whole.why_not
    settings = Settings(trainer={"processes": 2, "sharding": "fsdp"})
    shared = plan.make(model, settings, trains)
    assert shared.fits and shared.row > 4096
    gathered = max(model.embedding_bytes, 2 * model.largest_layer_bytes)
    assert shared.step.base == model.weight_bytes // 2 + gathered < whole.step.base
    # Before there are logits, there is the buffer that the head is copied out of.
    heads = [step_bytes(model, trainer, 1024).head for trainer in (settings.trainer, Settings().trainer)]
    assert heads[0] > heads[1] > 0


def test_a_sharded_base_stays_on_its_cards(models: dict[str, ModelSizes]) -> None:
    trainer = {"processes": 2, "sharding": "fsdp"}
    shared = plan.make(models["0.5B"], Settings(trainer=trainer), Hardware(80 * GIB, "asleep"))
    assert "stays on its cards" in shared.why_not and "a second card like it for the trainer" in shared.why_not
    with pytest.raises(ValueError, match="set vllm.shares_device to false"):
        Settings(trainer=trainer, vllm={"shares_device": True})


@pytest.mark.parametrize(
    ("size", "gib", "card", "remedy"),
    [
        ("14B", 24, "own", "cards of 40 GiB"),
        ("14B", 24, "shared", "a card of 40 GiB"),
        ("32B", 48, "shared", "a card of 80 GiB"),
        ("32B", 24, "own", "cards of 80 GiB"),
    ],
)
def test_what_does_not_fit_says_what_would(
    models: dict[str, ModelSizes], size: str, gib: int, card: str, remedy: str
) -> None:
    assert planned(models[size], gib, MODES[card]).remedies == (remedy,)
    assert planned(models[size], int(remedy.split()[-2]), MODES[card]).fits


def test_host_memory_has_two_copies_of_the_weights_where_a_card_is_shared(models: dict[str, ModelSizes]) -> None:
    own, shared = planned(models["7B"], 24), planned(models["7B"], 24, "asleep")
    copies = shared.host_bytes - own.host_bytes
    assert 2 * models["7B"].weight_bytes < copies < 2.1 * models["7B"].weight_bytes


def test_both_on_one_card_without_sleep_divide_it(models: dict[str, ModelSizes]) -> None:
    one = planned(models["14B"], 80, "beside")
    assert one.fits and 0.45 <= one.utilisation <= 0.56
    assert one.utilisation * 80 * GIB + one.step.total < 80 * GIB
    tight = planned(models["7B"], 24, "beside")
    assert not tight.fits and tight.remedies[0].startswith("vllm.shares_device = true")
    assert "a second card like it for the trainer" in tight.remedies


def test_rows_become_as_long_as_the_memory_allows_and_are_refused_where_longer_ones_were_set(
    models: dict[str, ModelSizes],
) -> None:
    short = planned(models["7B"], 20.5)
    assert short.fits and 1024 <= short.row < 8192
    refused = planned(models["7B"], 20.5, trainer={"max_row_tokens": 8192})
    assert not refused.fits and "trainer.max_row_tokens is 8192" in refused.why_not
    assert refused.remedies[0] == f"trainer.max_row_tokens of at most {short.longest}"
    assert planned(models["7B"], 20.5, trainer={"max_row_tokens": short.longest, "micro_batch_tokens": 64}).fits


def test_a_longer_row_takes_more_and_the_longest_is_the_last_that_fits(models: dict[str, ModelSizes]) -> None:
    one = planned(models["7B"], 24)
    settings = Settings().trainer
    assert step_bytes(models["7B"], settings, one.longest).total <= one.trainer_bytes
    assert step_bytes(models["7B"], settings, one.longest + 256).total > one.trainer_bytes


def test_a_context_that_the_kv_cache_cannot_hold_is_refused(models: dict[str, ModelSizes]) -> None:
    one = planned(models["32B"], 80, vllm={"max_model_len": 32768})
    assert not one.fits and one.why_not.startswith("vllm.max_model_len is 32768")
    assert one.remedies[0] == f"vllm.max_model_len of at most {one.context}"
    assert planned(models["32B"], 80).context == one.context < 32768


def test_a_share_that_was_set_stays_and_is_refused_where_it_is_too_small(models: dict[str, ModelSizes]) -> None:
    assert planned(models["7B"], 80, vllm={"gpu_memory_utilization": 0.5}).utilisation == 0.5
    small = planned(models["7B"], 80, vllm={"gpu_memory_utilization": 0.2})
    assert not small.fits and small.remedies[0] == "vllm.gpu_memory_utilization left unset"


def test_two_cards_for_one_server_divide_the_weights(models: dict[str, ModelSizes]) -> None:
    one = plan.make(models["32B"], Settings(), Hardware(48 * GIB, "own", cards_each=2, trainer_card_bytes=80 * GIB))
    assert one.fits and one.server.weights == models["32B"].weight_bytes // 2


def test_a_quantised_base_fits_a_smaller_card_and_leaves_room_for_longer_rows(models: dict[str, ModelSizes]) -> None:
    trainer_alone = Hardware(24 * GIB, "own", serves=False)
    whole = plan.make(models["14B"], Settings(), trainer_alone)
    assert not whole.fits and whole.remedies[0].startswith("trainer.quantisation = int8")
    nf4, int8 = (Settings(trainer={"quantisation": one}) for one in ("nf4", "int8"))
    assert plan.make(models["14B"], nf4, trainer_alone).fits
    # 6.5B of 7.6B parameters are quantised, from 2 bytes to 0.516 or 1; one layer of 68M is widened.
    for settings, quantised in ((nf4, 0.516), (int8, 1)):
        base = step_bytes(models["7B"], settings.trainer, 1024).base
        assert base == pytest.approx(6.525e9 * quantised + 1.09e9 * 2 + 67.9e6 * 2, rel=0.01)
    rows = [plan.make(models["7B"], one, Hardware(24 * GIB, "own")).longest for one in (Settings(), int8, nf4)]
    assert rows[0] * 1.5 < rows[1] < rows[2]


def test_activations_in_host_memory_leave_room_for_longer_rows(models: dict[str, ModelSizes]) -> None:
    model, tokens = models["7B"], 8192
    stays, leaves = Settings().trainer, Settings(trainer={"activation_offload": True}).trainer
    saved = step_bytes(model, stays, tokens).activations - step_bytes(model, leaves, tokens).activations
    assert saved == (model.layers - 1) * 2 * model.hidden * tokens


def test_without_checkpointing_every_layer_keeps_its_activations(models: dict[str, ModelSizes]) -> None:
    keeps = Settings(trainer={"gradient_checkpointing": False}).trainer
    layers = models["1.5B"].layers
    ratio = (
        step_bytes(models["1.5B"], keeps, 8192).activations
        / step_bytes(models["1.5B"], Settings().trainer, 8192).activations
    )
    assert layers / 4 < ratio < layers
