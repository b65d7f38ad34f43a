"""Write what the plan says into the settings of a stack that starts, and say each choice in a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.config.settings import Settings, SettingsError
from whetstone.memory import devices, plan
from whetstone.memory.learning_rate import learning_rate_for
from whetstone.memory.model_files import ModelSizes, ModelUnreadable, read
from whetstone.memory.serving import GIB


@dataclass(frozen=True, slots=True)
class Automatic:
    """The settings with every automatic choice in them, and a line for each."""

    settings: Settings
    lines: tuple[str, ...]


def choose(
    settings: Settings,
    cards: Sequence[devices.Card],
    *,
    cpu_build: bool,
    cpu_trainer: bool = False,
    starts_vllm: bool = True,
    host_bytes: int | None = None,
) -> Automatic:
    """Return the settings with what is unset chosen for this machine.

    Args:
        settings: those of the user.
        cards: the GPUs of this machine.
        cpu_build: whether vLLM is its build for machines without a GPU.
        cpu_trainer: whether the trainer's torch is one.
        starts_vllm: whether `up` starts vLLM here; else its servers run already, and nothing is chosen for them.
        host_bytes: the memory of this machine, if known.

    Raises:
        SettingsError: the model does not fit, or a GPU is missing; one sentence, with what would do.
    """
    try:
        model = read(settings.model)
    except ModelUnreadable as error:
        return Automatic(settings, (f"nothing is planned for {settings.model}: {error}",))
    trainer: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    lines = []
    if settings.trainer.learning_rate is None:
        trainer["learning_rate"] = learning_rate_for(model.parameters)
        lines.append(
            f"trainer.learning_rate = {trainer['learning_rate']:g}, by the model's {model.billions} parameters"
        )
    if starts_vllm:
        lines.extend(_of_build(model, settings, cpu_build))
    serves = starts_vllm and not cpu_build and bool(cards)
    here = settings.training_service is None and not settings.launcher.command
    trains = here and bool(cards) and not cpu_trainer and settings.trainer.device in ("auto", "cuda")
    if serves or trains:
        placement = devices.place(settings, cards, serves=serves, trains=trains)
        if serves:
            vllm["devices"] = tuple(index for each in placement.vllm for index in each)
            lines.append(f"vllm.devices = {list(vllm['devices'])}")
        if trains:
            trainer["devices"] = placement.trainer
            lines.append(f"trainer.devices = {list(placement.trainer)}")
        planned = plan.make(model, settings, plan.hardware_of(settings, cards, placement))
        if not planned.fits:
            raise SettingsError(planned.why_not)
        _check_host(planned, host_bytes)
        if serves:
            lines.extend(_for_vllm(planned, settings, vllm))
        if trains:
            lines.extend(_for_trainer(planned, settings, trainer))
    return Automatic(
        settings.model_copy(
            update={
                "vllm": settings.vllm.model_copy(update=vllm),
                "trainer": settings.trainer.model_copy(update=trainer),
            }
        ),
        tuple(lines),
    )


def _of_build(model: ModelSizes, settings: Settings, cpu_build: bool) -> Iterator[str]:
    """Yield what vLLM's command line has by itself, see `whetstone.vllm.client.command`."""
    vllm = settings.vllm
    if cpu_build and vllm.enforce_eager is None:
        yield "vllm.enforce_eager = true, on vLLM's CPU build"
    if cpu_build and vllm.block_size is None:
        yield "vllm.block_size = 32, on vLLM's CPU build"
    if vllm.dtype == "auto" and model.item_bytes == 4:
        yield "vllm.dtype = float32, as the model's files are"


def _check_host(planned: plan.Plan, host_bytes: int | None) -> None:
    if host_bytes is not None and planned.host_bytes > host_bytes:
        raise SettingsError(
            f"{planned.model.name} on a card that vLLM and the trainer share needs {planned.host_bytes / GIB:.0f} GiB "
            f"of host memory, two copies of it among them, and this machine has {host_bytes / GIB:.0f}: give the "
            "trainer a card of its own (trainer.devices), or set vllm.shares_device = false if the card has room for "
            "both"
        )


def _for_vllm(planned: plan.Plan, settings: Settings, vllm: dict[str, Any]) -> Iterator[str]:
    """Write the plan's choices into `vllm`, and yield a line for each."""
    card = f"{planned.hardware.card_bytes / GIB:.0f} GiB"
    if planned.hardware.mode == "asleep" and not settings.vllm.shares_device:
        vllm["shares_device"] = True
        yield "vllm.shares_device = true: vLLM and the trainer have the same GPU; vLLM sleeps while a step trains"
    if settings.vllm.gpu_memory_utilization is None:
        vllm["gpu_memory_utilization"] = planned.utilisation
        share = f"{planned.utilisation:g} of {card}"
        yield f"vllm.gpu_memory_utilization = {share}, for {planned.server.kv_tokens} tokens of KV cache"
    if settings.vllm.max_model_len is None and planned.context < planned.model.longest:
        vllm["max_model_len"] = planned.context
        yield f"vllm.max_model_len = {planned.context}, as far as the KV cache goes"


def _for_trainer(planned: plan.Plan, settings: Settings, trainer: dict[str, Any]) -> Iterator[str]:
    """Write the plan's choices into `trainer`, and yield a line for each."""
    for name in ("max_row_tokens", "micro_batch_tokens"):
        if getattr(settings.trainer, name) > planned.row:
            trainer[name] = planned.row
            yield f"trainer.{name} = {planned.row}, as far as the memory goes"
