"""Train with TRL's GRPOTrainer on the tickets of examples/tickets. Runs in TRL's environment.

`python -m benchmarks.beside_trl.trl_side RUN`, where RUN is a `Run` as JSON. Saves the adapter of each step, and prints
a `Point` as a line of JSON. Loss and advantages are TRL's own defaults.

TRL's ways to sample, fastest first: its vLLM server takes weights by NCCL, and TRL refuses it without CUDA
(`VLLMClient.init_communicator`); vLLM in its own process (`colocate`) runs with vLLM's CPU build if that keeps the
weights that TRL writes into; else transformers.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from benchmarks.beside_trl.run import Point, Run
from benchmarks.kit.process import ROOT

sys.path.append(str(ROOT / "examples" / "tickets"))

import tickets

MAX_TOKENS = 4
"""Of an answer, as the app asks for."""
CONTEXT = 512
"""Longest prompt and answer that vLLM makes room for."""
STEPS, TICKETS = 1000, 12_000
"""More than a run takes."""


class Clock(TrainerCallback):  # type: ignore[misc]
    """Saves the adapter after each step, and ends the run in time. Saving does not count."""

    def __init__(self, run: Run) -> None:
        self._run, self._began, self._saving_s = run, 0.0, 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, model: Any, **_: Any) -> None:
        now = time.monotonic()
        seconds = now - self._began - self._saving_s
        folder = Path(self._run.folder) / f"step-{state.global_step}"
        model.save_pretrained(folder)
        if seconds >= self._run.seconds:
            control.should_training_stop = True
        answers = state.global_step * self._run.groups * self._run.attempts
        point = Point(str(folder), seconds, answers, answers, int(state.num_input_tokens_seen))
        sys.stdout.write(msgspec.json.encode(point).decode() + "\n")
        sys.stdout.flush()
        self._saving_s += time.monotonic() - now


def trainer_of(run: Run) -> GRPOTrainer:
    """Return TRL's trainer of this run."""
    rows = [tickets.ticket("train", run.seed, number) for number in range(TICKETS)]
    data = Dataset.from_list([{"prompt": tickets.messages(text), "team": team} for text, team in rows])
    arguments = GRPOConfig(
        output_dir=run.folder,
        seed=run.seed,
        shuffle_dataset=False,
        learning_rate=run.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=run.micro_batch,
        gradient_accumulation_steps=run.groups * run.attempts // run.micro_batch,
        num_generations=run.attempts,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        max_steps=STEPS,
        use_cpu=True,
        bf16=False,  # the model's own precision, as given below
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "bfloat16"},
        **(_with_vllm() if run.generation == "colocate" else {}),
    )
    lora = LoraConfig(r=run.lora_rank, lora_alpha=run.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return GRPOTrainer(model=run.model, args=arguments, reward_funcs=_rewards, train_dataset=data, peft_config=lora)


def _with_vllm() -> dict[str, Any]:
    """Let vLLM's CPU build keep its weights: packed for oneDNN or AMX it drops those that TRL writes into."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    return {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": CONTEXT}


def _rewards(completions: list[list[dict[str, str]]], team: list[str], **_: Any) -> list[float]:
    answers = [completion[0]["content"] for completion in completions]
    return [float(tickets.is_right(answer, right)) for answer, right in zip(answers, team, strict=True)]


def main() -> None:
    """Train."""
    run = msgspec.json.decode(sys.argv[1], type=Run)
    torch.set_num_threads(os.cpu_count() or 1)
    trainer = trainer_of(run)
    trainer.add_callback(Clock(run))
    trainer.train()


if __name__ == "__main__":
    main()
