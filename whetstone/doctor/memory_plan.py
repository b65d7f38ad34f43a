"""Show the plan of a model's memory: what vLLM gets, what the trainer gets, and whether it fits."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whetstone.config.settings import Settings, SettingsError
from whetstone.memory import devices, plan
from whetstone.memory.learning_rate import learning_rate_of
from whetstone.memory.model_files import read
from whetstone.memory.serving import GIB
from whetstone.memory.training import TRAINER_BYTES
from whetstone.terminal.fitting import Fitting

WAYS = {
    "own": "vLLM and the trainer have cards of their own",
    "asleep": "they share a card: vLLM sleeps while a step trains, the trainer's weights are in host memory else",
    "beside": "they share a card, and both stay on it",
}


def examine(settings: Settings, model: str, card_gib: float | None, shared: bool | None) -> plan.Plan:
    """Return the plan of a model on cards of that memory, or on the GPUs of this machine.

    `shared`: whether vLLM and the trainer share a card; None: as the settings and the GPUs say.

    Raises:
        ModelUnreadable: the model's files cannot be read.
        SettingsError: no memory is named, and no GPU is here.
    """
    sizes = read(model)
    trains = settings.training_service is None and not settings.launcher.command
    if card_gib is not None:
        mode = plan.shared_mode(settings) if shared or (shared is None and settings.vllm.shares_device) else "own"
        each = max(1, len(settings.vllm.devices_each[0]))
        return plan.make(sizes, settings, plan.Hardware(int(card_gib * GIB), mode, each, trains=trains))
    cards = devices.cards()
    if not cards:
        raise SettingsError("nvidia-smi finds no GPU here: name the memory of a card with --device-gb, such as 24")
    placement = devices.place(settings, cards, serves=True, trains=trains)
    return plan.make(sizes, settings, plan.hardware_of(settings, cards, placement, shared))


def shown(planned: plan.Plan, settings: Settings) -> RenderableType:
    """Return a table of the shares, and the verdict below it."""
    model, hardware = planned.model, planned.hardware
    card = f"{hardware.card_bytes / GIB:.0f} GiB"
    table = Table("of the card", "GiB", "", title_justify="left")
    table.title = f"{model.name}, {model.billions} parameters, on {card}: {WAYS[hardware.mode]}"
    for name, count, remark in _rows(planned, settings):
        table.add_row(name, "" if count is None else f"{count / GIB:.1f}", Text(remark, style="dim"))
    verdict = Text("it fits", style="bold green")
    if not planned.fits:
        verdict = Text(f"it does not fit: {planned.why_not}", style="bold red")
    return Group(Fitting(table), verdict)


def as_object(planned: plan.Plan, settings: Settings) -> dict[str, object]:
    """Return the plan for programs; memory in bytes."""
    server, step = planned.server, planned.step
    return {
        "model": planned.model.name,
        "parameters": planned.model.parameters,
        "learning_rate": learning_rate_of(settings.trainer, planned.model.parameters),
        "quantisation": settings.trainer.quantisation,
        "mode": planned.hardware.mode,
        "card_bytes": planned.hardware.card_bytes,
        "gpu_memory_utilization": planned.utilisation,
        "vllm": {"weights": server.weights, "adapters": server.adapters, "work": server.work, "kv": server.kv_cache},
        "kv_tokens": server.kv_tokens,
        "max_model_len": planned.context,
        "trainer": {"base": step.base, "adapter": step.adapter, "activations": step.activations, "head": step.head},
        "max_row_tokens": planned.row,
        "longest_row_tokens": planned.longest,
        "host_bytes": planned.host_bytes,
        "fits": planned.fits,
        "problems": planned.problems,
        "remedies": planned.remedies,
    }


def _rows(planned: plan.Plan, settings: Settings) -> Iterator[tuple[str, float | None, str]]:
    server, step, hardware = planned.server, planned.step, planned.hardware
    rate = learning_rate_of(settings.trainer, planned.model.parameters)
    divided = f", a part of {hardware.cards_each}" if hardware.cards_each > 1 else ""
    yield "vLLM", planned.utilisation * hardware.card_bytes, f"--gpu-memory-utilization {planned.utilisation:g}"
    yield "  weights", server.weights, f"in {'16' if server.item_bytes == 2 else '32'} bits{divided}"
    yield "  adapters", server.adapters, f"{settings.vllm.max_loras} slots of rank {settings.trainer.lora_rank}"
    yield "  its own work", server.work, "CUDA, graphs, activations, logits; partly stated, not measured"
    yield "  KV cache", max(0, server.kv_cache), f"{server.kv_tokens} tokens; longest request {planned.context}"
    if hardware.trains:
        yield "trainer", planned.trainer_bytes + TRAINER_BYTES, "what a step may take, with its process"
        quantised = "" if settings.trainer.quantisation == "none" else f"in {settings.trainer.quantisation}, "
        yield "  base model", step.base, f"{_of_share(settings)}{quantised}learning rate {rate:g}"
        yield "  adapter", step.adapter, "weights, gradient and optimizer in fp32"
        yield "  activations", step.activations, _of_rows(planned)
        yield "  logits", step.head, "beyond the activations' own peak"
    yield "host memory", planned.host_bytes, _of_host(planned)


def _of_share(settings: Settings) -> str:
    if settings.trainer.sharding == "none":
        return ""
    return f"a share of {settings.trainer.processes}, and what is gathered at once; "


def _of_rows(planned: plan.Plan) -> str:
    if not planned.row:
        return f"rows of {plan.LEAST_ROW} tokens, which do not fit"
    return f"rows of {planned.row} tokens; the longest that fits: {planned.longest}"


def _of_host(planned: plan.Plan) -> str:
    if planned.hardware.mode != "asleep":
        return "processes"
    return "processes, and two copies of the weights: sleeping vLLM's, and the trainer's between steps"
