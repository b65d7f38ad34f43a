"""Be vLLM's worker for the CPU, with LoRAs by matrix products. vLLM imports it by `--worker-cls`; nothing else does."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from whetstone.vllm import cpu_lora


class Worker(CPUWorker):  # type: ignore[misc]  # the type checker does not read vLLM
    """Loads the model with `GroupedLora` in place of vLLM's own class."""

    def load_model(self, *args: Any, **named: Any) -> None:
        """Load the model. Its LoRA layers ask the platform for the class that computes them."""
        current_platform.get_punica_wrapper = lambda: f"{cpu_lora.__name__}.{cpu_lora.GroupedLora.__name__}"
        super().load_model(*args, **named)
