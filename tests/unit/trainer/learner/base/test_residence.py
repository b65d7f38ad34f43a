"""Between steps nothing of a learner is on the device, and a step with that is the same step."""

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from trainer.domain.rows import Row
from trainer.errors import RowError
from trainer.learner.base import residence
from trainer.learner.base.residence import HostWeights, Residence
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

MakeRows = Callable[..., list[Row]]

STAYS = TrainerSettings(threads=1, device="cpu")
LEAVES = TrainerSettings(threads=1, device="cpu", offload=True)


def base_of(learner: Learner) -> dict[str, Tensor]:
    return {name: one for name, one in learner._model.named_parameters() if not one.requires_grad}


def in_host_block(learner: Learner) -> bool:
    """Whether every weight of the base is the one of the host's block."""
    assert learner._residence is not None
    block = {one.data_ptr() for one in learner._residence._host}
    return {one.data_ptr() for one in base_of(learner).values()} == block


def test_a_learner_that_leaves_its_device_takes_the_same_steps_bit_for_bit(
    tiny_model: Path, make_rows: MakeRows
) -> None:
    stays, leaves = Learner.fresh(tiny_model, STAYS, seed=1), Learner.fresh(tiny_model, LEAVES, seed=1)
    for seed in range(3):
        rows = make_rows(6, seed=seed)
        assert leaves.step(rows, 0) == stays.step(rows, 0)
        assert leaves.files() == stays.files()
        assert in_host_block(leaves)
        assert leaves.logprobs([1, 2, 3], [4, 5]) == stays.logprobs([1, 2, 3], [4, 5])
        assert in_host_block(leaves)


def test_nothing_of_the_base_stays_behind_and_not_after_an_error(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, LEAVES, seed=1)
    seen: list[weakref.ref[Tensor]] = []

    def stop(_done: int, _total: int) -> None:
        assert not in_host_block(learner)
        seen.extend(weakref.ref(one.untyped_storage()) for one in base_of(learner).values())
        raise RowError("stop")

    with pytest.raises(RowError, match="stop"):
        learner.step(make_rows(4), 0, stop)
    gc.collect()
    assert in_host_block(learner) and len(seen) > 20 and not any(one() for one in seen)


def test_the_lora_and_its_moments_go_along(tiny_model: Path, make_rows: MakeRows) -> None:
    learner = Learner.fresh(tiny_model, LEAVES, seed=1)
    learner.step(make_rows(4), 0)
    residence, state = learner._residence, learner._optimizer.state
    assert residence is not None
    residence._device = torch.device("cpu:0")  # for torch another device than "cpu": what goes there is copied
    lora = [one for one in learner._model.parameters() if one.requires_grad]
    tensors = [*(one.data for one in lora), *(state[one][key] for one in lora for key in ("exp_avg", "exp_avg_sq"))]
    with residence.present():
        there = [*(one.data for one in lora), *(state[one][key] for one in lora for key in ("exp_avg", "exp_avg_sq"))]
        assert not {one.data_ptr() for one in tensors} & {one.data_ptr() for one in there}
        assert all(torch.equal(one, other) for one, other in zip(tensors, there, strict=True))


class Peak(TorchDispatchMode):
    """Counts the bytes of copies that exist at once, of the sizes that are weights of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.now += result.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(result.untyped_storage(), self.free, result.nbytes)
        return result

    def free(self, count: int) -> None:
        self.now -= count


def test_to_read_a_probe_the_layers_pass_one_by_one(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(tiny_model, num_hidden_layers=12, layer_types=["full_attention"] * 12)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    learner = Learner.fresh(tmp_path, LEAVES, seed=1)
    layers = base_of(learner)
    layer_bytes = sum(one.nbytes for name, one in layers.items() if ".layers.0." in name)
    lora_bytes = sum(one.nbytes for one in learner._model.parameters() if one.requires_grad)
    rest = sum(one.nbytes for name, one in layers.items() if ".layers." not in name)
    with Peak() as peak:
        learner.logprobs([1, 2, 3], [4, 5])
    assert layer_bytes <= peak.most <= 2 * layer_bytes + rest + lora_bytes < 12 * layer_bytes


def test_which_layers_pass_is_computed_once(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner.fresh(tiny_model, LEAVES, seed=1)
    first = learner.logprobs([1, 2, 3], [4, 5])
    monkeypatch.setattr(residence, "_parts", None)
    assert learner.logprobs([1, 2, 3], [4, 5]) == first


def test_learners_on_one_base_share_the_hosts_block_which_the_next_base_frees(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows
) -> None:
    one, other = Learner.fresh(tiny_model, LEAVES, seed=1), Learner.fresh(tiny_model, LEAVES, seed=2)
    assert one._residence is not None and other._residence is not None
    assert one._residence._weights is other._residence._weights
    other.step(make_rows(4), 0)
    assert in_host_block(one) and in_host_block(other)
    block = weakref.ref(one._residence._weights)
    del one, other
    shutil.copytree(tiny_model, tmp_path / "next")
    Learner.fresh(tmp_path / "next", LEAVES, seed=1)
    gc.collect()
    assert block() is None


@pytest.fixture
def plain(tiny_model: Path) -> Iterator[torch.nn.Module]:
    yield AutoModelForCausalLM.from_pretrained(tiny_model).requires_grad_(False)


def test_the_block_is_the_models_size_and_tied_weights_are_in_it_once(plain: torch.nn.Module) -> None:
    before = {name: one.clone() for name, one in plain.named_parameters()}
    residence = Residence(plain, HostWeights(plain.parameters(), torch.device("cpu")))
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in residence._host}
    (block_bytes,) = storages.values()
    weights = sum(one.nbytes for one in before.values())
    assert weights <= block_bytes < weights + 4096 * len(before)
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight  # type: ignore[operator]
    assert all(torch.equal(one, before[name]) for name, one in plain.named_parameters())
