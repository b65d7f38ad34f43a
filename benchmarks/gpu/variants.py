"""List the ways in which a model is run: vLLM and the trainer on two cards, on one that they share, with Unsloth."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit.process import ROOT
from whetstone.memory.devices import Card, visible_to

UNSLOTH_PYTHON = ROOT / ".venv-gpu-unsloth" / "bin" / "python"


@dataclass(frozen=True)
class Variant:
    """One way."""

    name: str
    cards: tuple[int, ...] = ()
    """By their numbers in nvidia-smi; none: what the machine has."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Besides the environment's."""

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Let the programs that are started meanwhile see only its cards."""
        ours = visible_to(self.cards)
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def variants(cards: Sequence[Card], unsloth: Path = UNSLOTH_PYTHON) -> list[Variant]:
    """Return the ways for these cards; the first is what `up` would do. With Unsloth where its environment is there."""
    if not cards:
        return [Variant("without a GPU")]
    numbers = tuple(card.index for card in cards)
    ways = [Variant("a card each", numbers[:2])] if len(numbers) > 1 else []
    ways.append(Variant("one card shared", numbers[:1]))
    if unsloth.exists():
        settings = {"trainer__backend": "unsloth", "trainer__python": unsloth}
        ways.append(Variant(f"{ways[0].name}, Unsloth", ways[0].cards, settings))
    return ways
