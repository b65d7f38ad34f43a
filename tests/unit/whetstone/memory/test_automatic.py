"""What `up` chooses by itself: each choice is a line, what was set stays, and what cannot fit never starts."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory.shapes import write
from whetstone.config.settings import STARTER, Settings, SettingsError
from whetstone.memory.automatic import Automatic, choose
from whetstone.memory.devices import Card
from whetstone.memory.learning_rate import learning_rate_for

GIB = 2**30


def cards(*gib: float) -> list[Card]:
    return [Card(index, f"GPU-{index}", int(each * GIB), "NVIDIA") for index, each in enumerate(gib)]


def chosen(model: Path, *gib: float, **settings: Any) -> Automatic:
    return choose(Settings(model=str(model), **settings), cards(*gib), cpu_build=False)


@pytest.fixture(scope="module")
def model_7b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models"), "7B")


def test_on_a_cpu_only_the_learning_rate_is_chosen_and_it_is_the_starters() -> None:
    before = Settings()
    one = choose(before, (), cpu_build=True)
    assert one.settings.trainer.learning_rate == 1e-3
    assert one.settings.model_copy(update={"trainer": before.trainer}) == before
    assert one.lines == (
        "trainer.learning_rate = 0.001, by the model's 0.853M parameters",
        "vllm.enforce_eager = true, on vLLM's CPU build",
        "vllm.block_size = 32, on vLLM's CPU build",
        "vllm.dtype = float32, as the model's files are",
    )


def test_one_card_is_shared_and_vllm_sleeps(model_7b: Path) -> None:
    one = chosen(model_7b, 24)
    vllm, trainer = one.settings.vllm, one.settings.trainer
    assert vllm.shares_device and vllm.devices == trainer.devices == (0,)
    assert vllm.gpu_memory_utilization is not None and 0.75 < vllm.gpu_memory_utilization < 0.92
    assert trainer.learning_rate == 1e-5
    names = [line.partition(" =")[0] for line in one.lines]
    assert names == [
        "trainer.learning_rate", "vllm.devices", "trainer.devices", "vllm.shares_device", "vllm.gpu_memory_utilization",
        "vllm.max_model_len",
    ]  # fmt: skip


def test_two_cards_are_one_each(model_7b: Path) -> None:
    one = chosen(model_7b, 24, 24)
    assert not one.settings.vllm.shares_device and one.settings.vllm.gpu_memory_utilization == 0.92
    assert (one.settings.vllm.devices, one.settings.trainer.devices) == ((0,), (1,))


def test_without_sleep_both_stay_on_the_card(model_7b: Path) -> None:
    one = chosen(model_7b, 80, vllm={"shares_device": False})
    assert not one.settings.vllm.shares_device and 0.6 < (one.settings.vllm.gpu_memory_utilization or 0) < 0.8


def test_rows_become_shorter_where_the_memory_ends(model_7b: Path) -> None:
    one = chosen(model_7b, 20.5, 20.5)
    row = one.settings.trainer.max_row_tokens
    assert 1024 <= row < 8192 and one.settings.trainer.micro_batch_tokens == row
    assert f"trainer.max_row_tokens = {row}, as far as the memory goes" in one.lines


def test_what_was_set_stays(model_7b: Path) -> None:
    trainer = {"learning_rate": 3e-6, "max_row_tokens": 4096, "micro_batch_tokens": 2048, "devices": (1,)}
    vllm = {"gpu_memory_utilization": 0.85, "max_model_len": 4096, "devices": (0,)}
    one = chosen(model_7b, 80, 80, trainer=trainer, vllm=vllm)
    assert one.settings == Settings(model=str(model_7b), trainer=trainer, vllm=vllm)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    model = write(tmp_path, "32B")
    with pytest.raises(SettingsError, match=r"vLLM needs .* of a card of 48 GiB.*What would fit: a card of 80 GiB"):
        chosen(model, 48)
    with pytest.raises(SettingsError, match="needs 130 GiB of host memory, two copies of it among them"):
        choose(Settings(model=str(model)), cards(80), cpu_build=False, host_bytes=100 * GIB)
    assert choose(Settings(model=str(model)), cards(80), cpu_build=False, host_bytes=200 * GIB).settings


def test_a_trainer_on_the_cpu_leaves_the_card_to_vllm(model_7b: Path) -> None:
    one = choose(Settings(model=str(model_7b)), cards(24), cpu_build=False, cpu_trainer=True)
    assert one.settings.vllm.devices == (0,) and one.settings.trainer.devices == ()
    assert not one.settings.vllm.shares_device and one.settings.vllm.gpu_memory_utilization == 0.92


def test_a_training_service_leaves_the_card_to_vllm(model_7b: Path) -> None:
    one = chosen(model_7b, 24, training_service={"url": "http://127.0.0.1:9"}, trainer={"loss": "dapo"})
    assert not one.settings.vllm.shares_device and one.settings.vllm.gpu_memory_utilization == 0.92
    assert (one.settings.vllm.devices, one.settings.trainer.devices) == ((0,), ())


def test_servers_that_run_already_are_left_as_they_are(model_7b: Path) -> None:
    one = choose(Settings(model=str(model_7b)), cards(24), cpu_build=False, starts_vllm=False)
    assert one.settings.vllm == Settings().vllm and one.settings.trainer.devices == (0,)
    with pytest.raises(SettingsError, match=r"^a step on Qwen2.5-7B-Instruct needs .*, or cards of 24 GiB"):
        choose(Settings(model=str(model_7b)), cards(16), cpu_build=False, starts_vllm=False)


def test_a_model_whose_files_cannot_be_read_starts_without_a_plan(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path))
    one = choose(settings, cards(24), cpu_build=False)
    assert one.settings == settings and one.lines[0].startswith(f"nothing is planned for {tmp_path}: ")


def test_the_learning_rate_falls_with_the_size_and_never_rises() -> None:
    sizes = {853_000: 1e-3, 135e6: 5e-5, 494e6: 5e-5, 1.54e9: 3.5e-5, 7.6e9: 1e-5, 32.8e9: 1e-5}
    assert {size: learning_rate_for(int(size)) for size in sizes} == sizes
    rates = [learning_rate_for(int(10 ** (exponent / 10))) for exponent in range(30, 120)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1e-3 and rates[-1] == 1e-5
    assert choose(Settings(model=str(STARTER)), (), cpu_build=True).settings.trainer.learning_rate == rates[0]
