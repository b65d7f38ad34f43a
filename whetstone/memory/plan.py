"""Plan a model on its cards: the share of each program, the longest row, tokens of KV cache, and whether it fits.

Three ways to have the devices:

- `own`: vLLM and the trainer compute on different cards.
- `asleep`: they share one, and vLLM sleeps while a step trains (`vllm.shares_device`). Between steps the trainer's
  weights are in host memory.
- `beside`: they share one, and both stay on it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from whetstone.config.settings import Settings
from whetstone.memory.devices import Card, Placement
from whetstone.memory.model_files import ModelSizes
from whetstone.memory.serving import ASLEEP_BYTES, GIB, ServerBytes, server_bytes
from whetstone.memory.training import (
    ROW_STEP,
    TRAINER_BYTES,
    StepBytes,
    longest_row,
    lora_parameters,
    reading_bytes,
    step_bytes,
)

Mode = Literal["own", "asleep", "beside"]

UTILISATION = 0.92
"""vLLM's own default of --gpu-memory-utilization."""
FRAGMENTS = 1.05
"""torch's allocator takes more than is in use. Stated, not measured here."""
SPARE_BYTES = int(0.3 * GIB)
"""Left free on a shared card beside what was computed."""
LEAST_CONTEXT = 2048
"""Tokens of the KV cache with which vLLM is of use."""
LEAST_ROW = 1024
"""Tokens of a row with which training is of use."""
HOST_BYTES = 6 * GIB
"""Host memory of vLLM's and the trainer's processes, proxy, workers. Measured with small models on CPU: 5 GiB."""
CARDS_GIB = (16, 24, 32, 40, 48, 80, 96, 141, 180, 288)
"""Memory of cards that can be had."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The cards that a plan is for. Bytes are those of one card."""

    card_bytes: int
    mode: Mode
    cards_each: int = 1
    """Cards among which each vLLM divides the model."""
    trainer_card_bytes: int | None = None
    """None: as large as vLLM's."""
    serves: bool = True
    trains: bool = True
    """Whether vLLM and the trainer are on these cards at all; what is not is not planned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What each program gets. `problems` is empty if it fits; else `remedies` says what would."""

    model: ModelSizes
    hardware: Hardware
    utilisation: float
    server: ServerBytes
    context: int
    """Longest prompt plus answer that vLLM can serve, in tokens: of the setting or the model, as far as the KV cache
    goes."""
    step: StepBytes
    """At a micro-batch of `row` tokens."""
    row: int
    """Longest row and micro-batch, in tokens: of the settings, as far as the memory goes."""
    longest: int
    """Longest row that the memory would allow, in tokens."""
    trainer_bytes: int
    """What the trainer's step may take of its card."""
    host_bytes: int
    problems: tuple[str, ...]
    remedies: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether all of it fits."""
        return not self.problems

    @property
    def why_not(self) -> str:
        """One sentence: what does not fit, and what would."""
        return f"{'; '.join(self.problems)}. What would fit: {', or '.join(self.remedies) or 'a smaller model'}"


def shared_mode(settings: Settings) -> Mode:
    """Return how vLLM and the trainer share a card: asleep, unless the settings say that vLLM does not sleep."""
    asleep = settings.vllm.shares_device or "shares_device" not in settings.vllm.model_fields_set
    return "asleep" if asleep else "beside"


def hardware_of(
    settings: Settings, cards: Sequence[Card], placement: Placement, shared: bool | None = None
) -> Hardware:
    """Return what a plan needs of the cards: the smallest of them. `shared`: None: as the placement says."""
    bytes_of = {card.index: card.memory_bytes for card in cards}
    serving = [bytes_of[index] for each in placement.vllm for index in each]
    training = [bytes_of[index] for index in placement.trainer]
    is_shared = placement.is_shared if shared is None else shared
    return Hardware(
        card_bytes=min(serving or training),
        mode=shared_mode(settings) if is_shared else "own",
        cards_each=max(1, *map(len, placement.vllm)) if placement.vllm else 1,
        trainer_card_bytes=min(training or serving),
        serves=bool(serving),
        trains=bool(training),
    )


def make(model: ModelSizes, settings: Settings, hardware: Hardware) -> Plan:
    """Return the plan of a model on this hardware, with the remedies where it does not fit."""
    plan = _plan(model, settings, hardware)
    return plan if plan.fits else replace(plan, remedies=tuple(_remedies(plan, settings)))


def resting_bytes(model: ModelSizes, settings: Settings) -> int:
    """Return what the trainer needs of a shared card while vLLM is awake, to read the tokens of a probe.

    The layers come from host memory one by one; the head and the adapter stay while it reads a micro-batch.
    """
    reading = reading_bytes(model, settings.trainer.micro_batch_tokens)
    largest = max(model.embedding_bytes, model.largest_layer_bytes)
    adapter = 4 * lora_parameters(model, settings.trainer)
    return TRAINER_BYTES + model.head_bytes + largest + adapter + reading


def _plan(model: ModelSizes, settings: Settings, hardware: Hardware) -> Plan:
    wanted = max(settings.trainer.max_row_tokens, settings.trainer.micro_batch_tokens)
    most = model.longest or wanted
    card = hardware.card_bytes
    trainer_card = hardware.trainer_card_bytes or card
    utilisation = settings.vllm.gpu_memory_utilization
    if hardware.mode == "beside":
        row = wanted
        while True:
            takes = TRAINER_BYTES + int(FRAGMENTS * step_bytes(model, settings.trainer, row).total)
            share = utilisation or _floor((card - takes - SPARE_BYTES) / card)
            server = server_bytes(model, settings, card, share, hardware.cards_each)
            if server.kv_tokens >= max(LEAST_CONTEXT, row) or row // 2 < LEAST_ROW or utilisation:
                break
            row //= 2
        free = trainer_card - int(share * card) - TRAINER_BYTES
    elif hardware.mode == "asleep":
        share = utilisation or _floor((card - resting_bytes(model, settings) - SPARE_BYTES) / card)
        free = trainer_card - ASLEEP_BYTES - TRAINER_BYTES
    else:
        share = utilisation or UTILISATION
        free = trainer_card - TRAINER_BYTES
    free = int(free / FRAGMENTS)
    server = server_bytes(model, settings, card, share, hardware.cards_each)
    room = longest_row(model, settings.trainer, free, most=max(most, wanted))
    row, longest = min(wanted, room), min(most, room)
    step = step_bytes(model, settings.trainer, row or LEAST_ROW)
    context = min(settings.vllm.max_model_len or most, server.kv_tokens // ROW_STEP * ROW_STEP)
    asleep = hardware.mode == "asleep"
    # vLLM's weights while it sleeps; the trainer's base, adapter and moments between steps.
    copies = server.weights * hardware.cards_each + step.base + step.adapter * 3 // 4 if asleep else 0
    plan = Plan(model, hardware, share, server, context, step, row, longest, free, HOST_BYTES + copies, problems=())
    return replace(plan, problems=tuple(_problems(plan, settings)))


def _floor(share: float) -> float:
    """Return a share that vLLM accepts, rounded down to two digits."""
    return min(UTILISATION, max(0.01, math.floor(share * 100) / 100))


def _problems(plan: Plan, settings: Settings) -> Iterator[str]:
    if plan.hardware.serves:
        yield from _problems_of_serving(plan, settings)
    if plan.hardware.trains:
        yield from _problems_of_training(plan, settings)


def _problems_of_serving(plan: Plan, settings: Settings) -> Iterator[str]:
    model, server, vllm = plan.model, plan.server, settings.vllm
    least = min(LEAST_CONTEXT, model.longest or LEAST_CONTEXT)
    needed = server.weights + server.adapters + server.work
    gets = plan.utilisation * plan.hardware.card_bytes
    if server.kv_tokens < least:
        yield (
            f"vLLM needs {_gib(needed)} for {model.name}'s weights, adapters and its own work, and a KV cache; it gets "
            f"{_gib(gets)} of {_card(plan.hardware.card_bytes)}"
        )
    elif vllm.max_model_len is not None and server.kv_tokens < vllm.max_model_len:
        yield (
            f"vllm.max_model_len is {vllm.max_model_len}, and its KV cache on {_card(plan.hardware.card_bytes)} has "
            f"{server.kv_tokens} tokens"
        )


def _problems_of_training(plan: Plan, settings: Settings) -> Iterator[str]:
    model, trainer = plan.model, settings.trainer
    least = min(LEAST_ROW, model.longest or LEAST_ROW)
    if plan.hardware.mode == "asleep" and trainer.sharding == "fsdp":
        yield (
            "trainer.sharding is fsdp, and a sharded base model stays on its cards, so vLLM cannot have one of them "
            "between steps"
        )
    if plan.longest < least:
        needed = step_bytes(model, trainer, least).total
        yield (
            f"a step on {model.name} needs {_gib(needed)} at rows of {least} tokens, and "
            f"{_gib(max(0, plan.trainer_bytes))} are left for it"
        )
    elif "max_row_tokens" in trainer.model_fields_set and plan.row < trainer.max_row_tokens <= (model.longest or 2**31):
        needed = step_bytes(model, trainer, trainer.max_row_tokens).total
        yield (
            f"trainer.max_row_tokens is {trainer.max_row_tokens}, for which a step on {model.name} needs "
            f"{_gib(needed)}, and {_gib(plan.trainer_bytes)} are left for it"
        )


def _remedies(plan: Plan, settings: Settings) -> Iterator[str]:
    """Yield the changes with which the plan would fit, the smallest first."""
    model, hardware = plan.model, plan.hardware

    def fits(changed: Settings, other: Hardware) -> bool:
        return not _plan(model, changed, other).problems

    trainer = settings.trainer
    if trainer.max_row_tokens > plan.longest >= LEAST_ROW:
        rows = {"max_row_tokens": plan.longest, "micro_batch_tokens": min(plan.longest, trainer.micro_batch_tokens)}
        if fits(settings.model_copy(update={"trainer": trainer.model_copy(update=rows)}), hardware):
            yield f"trainer.max_row_tokens of at most {plan.longest}"
    context = plan.server.kv_tokens // ROW_STEP * ROW_STEP
    if (settings.vllm.max_model_len or 0) > context >= LEAST_CONTEXT:
        shorter = settings.vllm.model_copy(update={"max_model_len": context})
        if fits(settings.model_copy(update={"vllm": shorter}), hardware):
            yield f"vllm.max_model_len of at most {context}"
    if trainer.quantisation == "none" and trainer.backend == "hf":
        for fewer in ("int8", "nf4"):
            changed = trainer.model_copy(update={"quantisation": fewer})
            if fits(settings.model_copy(update={"trainer": changed}), hardware):
                yield f"trainer.quantisation = {fewer}, for which the trainer's probabilities differ more from vLLM's"
                break
    if settings.vllm.gpu_memory_utilization is not None:
        automatic = settings.vllm.model_copy(update={"gpu_memory_utilization": None})
        if fits(settings.model_copy(update={"vllm": automatic}), hardware):
            yield "vllm.gpu_memory_utilization left unset"
    if hardware.mode == "beside" and fits(settings, replace(hardware, mode="asleep")):
        yield "vllm.shares_device = true, with which vLLM sleeps while a step trains"
    if hardware.mode != "own" and fits(settings, replace(hardware, mode="own")):
        yield "a second card like it for the trainer"
    for each in (2, 4, 8):
        if each > hardware.cards_each and fits(settings, replace(hardware, mode="own", cards_each=each)):
            yield f"{each} cards like it for vLLM (vllm.devices) and one for the trainer"
            break
    for gib in CARDS_GIB:
        larger = replace(hardware, card_bytes=gib * GIB, trainer_card_bytes=None)
        if gib * GIB > hardware.card_bytes and fits(settings, larger):
            yield f"{'a card' if hardware.mode != 'own' else 'cards'} of {gib} GiB"
            break
    for each in (2, 4, 8):
        sharded = trainer.model_copy(update={"processes": each, "sharding": "fsdp"})
        is_more = hardware.mode == "own" and each > trainer.processes
        if is_more and fits(settings.model_copy(update={"trainer": sharded}), hardware):
            yield f'{each} cards like it for the trainer (trainer.processes = {each}, trainer.sharding = "fsdp")'
            break


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def _card(count: int) -> str:
    return f"a card of {count / GIB:.0f} GiB"
