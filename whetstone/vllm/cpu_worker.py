"""Be vLLM's worker for the CPU, with LoRAs by matrix products, and seeds where a prompt takes several steps.

vLLM imports it by `--worker-cls`; nothing else does.
"""

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

    def sample_tokens(self, *args: Any, **named: Any) -> Any:
        """Sample, but not with the generator of a request whose prompt goes on: its token is dropped.

        vLLM 0.32 takes such a generator back by its offset (`GPUModelRunner._bookkeeping_sync`), which generators of a
        CPU do not have: a request with a seed and a prompt that takes two steps would end the engine.
        """
        generators, dropped = self.model_runner.input_batch.generators, self.model_runner.discard_request_mask.np
        unused = {place: generators.pop(place) for place in list(generators) if dropped[place]}
        try:
            return super().sample_tokens(*args, **named)
        finally:
            generators.update(unused)
