"""The vLLM servers from a step's point of view: call any that answers, load a candidate on all healthy servers.

The proxy, not this module, loads other adapters and routes the requests of apps.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer.errors import TrainerError
from whetstone.registry.adapters import AdapterDamaged, NotCopied, StoreError
from whetstone.registry.remote.sources import AdapterSource
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused

OTHERS_S = 5.0
"""How long a candidate that is loaded on one server waits for the others. The proxy routes to the servers that have it,
and loads it where it is missing.
"""

T = TypeVar("T")

log = logging.getLogger(__name__)


class LoadRefused(TrainerError):
    """All servers are healthy, and none loads the adapter."""


@dataclass(frozen=True)
class LoadedServers:
    """Where a version is loaded."""

    on: "Replicas"
    """The servers that have it."""
    missing: Mapping[str, str]
    """Address -> why the server does not have it."""


class Replicas:
    """Servers with the same base model, by address."""

    def __init__(self, by_url: Mapping[str, Vllm], source: AdapterSource | None = None) -> None:
        """`source`: how adapters come to the servers' machines; None: they see their folders."""
        self._by_url = dict(by_url)
        self._source = source

    def __iter__(self) -> Iterator[Vllm]:
        return iter(self._by_url.values())

    def __len__(self) -> int:
        return len(self._by_url)

    def any(self, ask: Callable[[Vllm], T]) -> T:
        """Call `ask` with the first server that can be reached, and return its result.

        Raises:
            VllmDown: none can be reached.
            VllmRefused: as `ask` raises it.
        """
        down: list[VllmDown] = []
        for vllm in self._by_url.values():
            try:
                return ask(vllm)
            except VllmDown as error:
                down.append(error)
        raise down[0]

    def loading(self, adapters: Mapping[str, Path]) -> Callable[[], LoadedServers]:
        """Return a function to call until it no longer raises VllmDown.

        It loads the adapters (name -> folder) where they are missing: on every server if possible, after OTHERS_S on at
        least one. Besides VllmDown it raises:
            Refused: all are healthy, and none loads them.
        """
        others_until_s: float | None = None

        def load() -> LoadedServers:
            nonlocal others_until_s
            has: dict[str, Vllm] = {}
            refused: dict[str, str] = {}
            away: dict[str, str] = {}
            for url, vllm in self._by_url.items():
                try:
                    _load(vllm, url, adapters, self._source)
                    has[url] = vllm
                except (VllmDown, StoreError, NotCopied) as error:
                    away[url] = str(error)
                except AdapterDamaged as error:
                    refused[url] = str(error)
                except VllmRefused as error:
                    (refused if vllm.healthy() else away)[url] = str(error)
            if has and others_until_s is None:
                others_until_s = time.monotonic() + OTHERS_S
            if not has and not away:
                raise LoadRefused("; ".join(refused.values()))
            if len(has) < len(self) and (others_until_s is None or time.monotonic() < others_until_s):
                raise VllmDown("; ".join((away | refused).values()))
            missing = refused | away
            for url, why in missing.items():
                log.error("%s has not loaded %s, and takes no part in it: %s", url, ", ".join(adapters), why)
            return LoadedServers(Replicas(has), missing)

        return load


def _load(vllm: Vllm, url: str, adapters: Mapping[str, Path], source: AdapterSource | None) -> None:
    there = vllm.models()
    for name, folder in adapters.items():
        if name in there:
            continue
        try:
            vllm.load(name, folder if source is None else source.locate(url, folder, None))
        except VllmRefused:
            if name not in vllm.models():  # else another process loaded it first
                raise
