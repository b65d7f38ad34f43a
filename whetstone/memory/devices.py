"""Find the GPUs of this machine by nvidia-smi, and place vLLM and the trainer on them."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from whetstone.config.settings import Settings, SettingsError

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU."""

    index: int
    """Its number in nvidia-smi."""
    uuid: str
    memory_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Which GPUs each process has, by their numbers in nvidia-smi."""

    vllm: tuple[tuple[int, ...], ...]
    """Of each vLLM."""
    trainer: tuple[int, ...]
    """One for each of its processes."""

    @property
    def is_shared(self) -> bool:
        """Whether the trainer has a GPU that a vLLM has too."""
        return any(index in cards for cards in self.vllm for index in self.trainer)


def cards(environment: Mapping[str, str] = os.environ, query: Sequence[str] = QUERY) -> tuple[Card, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves; none without nvidia-smi, which every driver has.

    Raises:
        SettingsError: CUDA_VISIBLE_DEVICES names a GPU that is not here.
    """
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(parsed(done.stdout), environment.get("CUDA_VISIBLE_DEVICES"))


def parsed(lines: str) -> tuple[Card, ...]:
    """Return the GPUs of nvidia-smi's answer; its memory is in MiB."""
    rows = [[cell.strip() for cell in line.split(",", 3)] for line in lines.splitlines() if line.strip()]
    return tuple(
        Card(int(index), uuid, int(memory) * 2**20, name) for index, uuid, memory, name in rows if memory.isdigit()
    )


def visible(every: Sequence[Card], names: str | None) -> tuple[Card, ...]:
    """Return the GPUs that the variable names, in its order: numbers, or beginnings of UUIDs. Unset: all.

    Raises:
        SettingsError: it names a GPU that is not here.
    """
    if names is None:
        return tuple(every)
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        matching = [card for card in every if name == str(card.index) or (len(name) > 4 and card.uuid.startswith(name))]
        if name == "-1":  # CUDA's own sign for "no more"
            break
        if not matching:
            raise SettingsError(
                f"CUDA_VISIBLE_DEVICES names {name!r}, and nvidia-smi lists "
                f"{', '.join(str(card.index) for card in every) or 'no GPU'}"
            )
        chosen.append(matching[0])
    return tuple(chosen)


def place(settings: Settings, every: Sequence[Card], *, serves: bool, trains: bool) -> Placement:
    """Return the GPUs of each process: those of the settings, else one each; with too few, trainer and vLLM share.

    `serves` and `trains`: whether vLLM and the trainer compute on GPUs at all.

    Raises:
        SettingsError: there are too few, or one is not here.
    """
    here = [card.index for card in every]
    servers, processes = settings.vllm.replicas if serves else 0, settings.trainer.processes if trains else 0
    vllm = _named("vllm.devices", settings.vllm.devices, here) if serves else ()
    trainer = _named("trainer.devices", settings.trainer.devices, here) if trains else ()
    if not vllm:
        free = [index for index in here if index not in trainer]
        vllm = tuple((free if len(free) >= servers else here)[:servers])
    if not trainer:
        free = [index for index in here if index not in vllm]
        trainer = tuple((free if len(free) >= processes else here[::-1])[:processes])
    if len(vllm) < servers or len(trainer) < processes:
        setting, wanted = ("vllm.replicas", servers) if len(vllm) < servers else ("trainer.processes", processes)
        raise SettingsError(f"{setting} is {wanted}, and {_listed(here)}: set it to at most {len(here)}")
    each = len(vllm) // servers if servers else 0
    return Placement(tuple(vllm[each * number : each * (number + 1)] for number in range(servers)), trainer[:processes])


def visible_to(indexes: Sequence[int]) -> dict[str, str]:
    """Return the environment of a process that sees only these GPUs. CUDA otherwise numbers the fastest first."""
    if not indexes:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, indexes))}


def host_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory of this machine; None where Linux does not say it."""
    try:
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, IndexError, ValueError):
        return None


def _named(setting: str, indexes: Sequence[int], here: Sequence[int]) -> tuple[int, ...]:
    if strange := [index for index in indexes if index not in here]:
        raise SettingsError(f"{setting} names GPU {strange[0]}, and {_listed(here)}")
    return tuple(indexes)


def _listed(here: Sequence[int]) -> str:
    if not here:
        return "there is no GPU here"
    return f"the GPUs here are {', '.join(map(str, here))}" if len(here) > 1 else f"the only GPU here is {here[0]}"
