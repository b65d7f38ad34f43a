"""Which GPUs are here, and which each process has."""

import sys
from pathlib import Path
from typing import Any

import pytest

from whetstone.config.settings import Settings, SettingsError
from whetstone.memory.devices import Card, Placement, cards, host_memory_bytes, parsed, place, visible, visible_to

ANSWER = """\
0, GPU-aaaa1111, 24564, NVIDIA GeForce RTX 4090
1, GPU-bbbb2222, 81559, NVIDIA H100 80GB HBM3
2, GPU-cccc3333, [N/A], NVIDIA GB10
"""


def here(count: int) -> list[Card]:
    return [Card(index, f"GPU-{index}", 24 * 2**30, "NVIDIA L4") for index in range(count)]


def placed(count: int, *, serves: bool = True, trains: bool = True, **settings: Any) -> Placement:
    return place(Settings(**settings), here(count), serves=serves, trains=trains)


def test_nvidia_smi_is_read_and_a_gpu_without_memory_of_its_own_is_left_out() -> None:
    one, other = parsed(ANSWER)
    assert (one.index, one.uuid, one.memory_bytes, one.name) == (
        0,
        "GPU-aaaa1111",
        24564 * 2**20,
        "NVIDIA GeForce RTX 4090",
    )
    assert other.memory_bytes == 81559 * 2**20


def test_a_machine_without_nvidia_smi_has_no_gpu(tmp_path: Path) -> None:
    assert cards({}, [str(tmp_path / "nvidia-smi")]) == ()
    assert cards({}, [sys.executable, "-c", "raise SystemExit(9)"]) == ()
    (card,) = cards({"CUDA_VISIBLE_DEVICES": "1"}, [sys.executable, "-c", f"print({ANSWER!r})"])
    assert card.index == 1


def test_what_cuda_may_see_is_all_there_is() -> None:
    both = parsed(ANSWER)
    assert visible(both, None) == both and visible(both, "") == () and visible(both, "-1") == ()
    assert visible(both, "1, 0") == both[::-1] and visible(both, "GPU-bbbb") == both[1:]
    with pytest.raises(SettingsError, match="CUDA_VISIBLE_DEVICES names '7', and nvidia-smi lists 0, 1"):
        visible(both, "7")


@pytest.mark.parametrize(
    ("count", "settings", "vllm", "trainer"),
    [
        (1, {}, ((0,),), (0,)),
        (2, {}, ((0,),), (1,)),
        (4, {"vllm": {"replicas": 2}, "trainer": {"processes": 2}}, ((0,), (1,)), (2, 3)),
        (3, {"vllm": {"replicas": 2}, "trainer": {"processes": 2}}, ((0,), (1,)), (2, 1)),
        (4, {"vllm": {"devices": (2, 3)}}, ((2, 3),), (0,)),
        (4, {"vllm": {"replicas": 2, "devices": (0, 1, 2, 3)}}, ((0, 1), (2, 3)), (3,)),
        (4, {"trainer": {"devices": (0,)}}, ((1,),), (0,)),
        (2, {"vllm": {"devices": (0,)}, "trainer": {"devices": (0,)}}, ((0,),), (0,)),
    ],
)
def test_each_process_has_a_gpu_of_its_own_while_there_are_enough(
    count: int, settings: dict[str, Any], vllm: Any, trainer: Any
) -> None:
    one = placed(count, **settings)
    assert (one.vllm, one.trainer) == (vllm, trainer)
    assert one.is_shared == bool({index for each in vllm for index in each} & set(trainer))


def test_who_computes_on_the_cpu_has_no_gpu() -> None:
    assert placed(1, serves=False) == Placement((), (0,)) and placed(1, trains=False) == Placement(((0,),), ())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"vllm": {"replicas": 3}}, "vllm.replicas is 3, and the GPUs here are 0, 1: set it to at most 2"),
        ({"trainer": {"processes": 3}}, "trainer.processes is 3, and the GPUs here are 0, 1"),
        ({"vllm": {"devices": (5,)}}, "vllm.devices names GPU 5, and the GPUs here are 0, 1"),
        ({"trainer": {"devices": (2,)}}, "trainer.devices names GPU 2"),
    ],
)
def test_gpus_that_are_not_here_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        placed(2, **settings)


@pytest.mark.parametrize("settings", [{"vllm": {"replicas": 2, "devices": (0,)}}, {"vllm": {"devices": (1, 1)}}])
def test_servers_have_equal_parts(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not as many different ones for each server"):
        Settings(**settings)
    with pytest.raises(ValueError, match="devices names 1 GPUs for 2 processes, which take one each"):
        Settings(trainer={"processes": 2, "devices": (0,)})


def test_a_process_sees_its_gpus_by_the_numbers_of_nvidia_smi() -> None:
    assert visible_to((2, 0)) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2,0"}
    assert visible_to(()) == {}


def test_the_machines_memory_is_what_linux_says(tmp_path: Path) -> None:
    assert (host_memory_bytes() or 0) > 2**28
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\n")
    assert host_memory_bytes(tmp_path / "meminfo") is None
