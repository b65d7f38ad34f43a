"""Measure what a base in NF4 or int8 costs in accuracy, and saves in memory, on the CPU.

`python -m benchmarks.memory.quantised gradients FOLDER`: for the model as its files are, in int8 and in NF4, one line
each: the cosine of a step's LoRA gradient to that of the model in fp32 and to that of its files' precision; k3 of
server to trainer on tokens that the model sampled as its files are, with an adapter; and what the gate's parity says.

`python -m benchmarks.memory.quantised fresh FOLDER`: only the cosine, with an adapter that changes nothing yet, on text
that the model did not sample (this docstring).

`python -m benchmarks.memory.quantised peaks FOLDER|SIZE [--tokens N] [--only nf4 ...]`: for each, in a process of its
own, the most memory that loading and a step took, and what is planned. SIZE is one of Qwen2.5's (`1.5B`), with random
weights.

The server's stand-in is transformers with the files' precision: what it samples and its logprobs are a server's but
for the kernels.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.memory.peaks import MIB, in_own_process, of_step, row, saved, show
from benchmarks.memory.shapes import QWEN
from trainer.domain.figures import mean_k3
from trainer.domain.gate.parity import Readings, parity
from trainer.domain.rows import Answer, Row
from trainer.learner.learner import ADAPTER_WEIGHTS, Learner
from whetstone.config.trainer import Quantisation, TrainerSettings
from whetstone.memory.model_files import read
from whetstone.memory.training import step_bytes
from whetstone.registry.adapters import OPTIMIZER_STATE

WAYS: tuple[Quantisation, ...] = ("none", "int8", "nf4")
PROMPTS = (
    "Name three rivers of Europe and the seas that they flow into.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "List the steps to make pancakes.",
)
SPOKEN = 64
"""Tokens of each answer."""
RATE = 1e-3
"""Learning rate of the steps that make the adapter: it has to change something."""
STEPS = 3


def settings(quantisation: Quantisation, tokens: int) -> TrainerSettings:
    """Return the settings of a step."""
    return TrainerSettings(
        device="cpu", threads=1, quantisation=quantisation, gradient_checkpointing=True, measure_kl=False,
        trees=False, max_row_tokens=tokens, micro_batch_tokens=tokens, clip_norm=1e9, learning_rate=RATE,
    )  # fmt: skip


def gradients(folder: Path, work: Path) -> Iterator[str]:
    """Yield a line for each way to have the base."""
    wide = work / "fp32"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(wide)
    del model
    answers = sampled(folder)
    rows = [as_row(one, 1.0 if place % 2 else -1.0, str(place)) for place, one in enumerate(answers)]
    teacher = Learner.fresh(wide, settings("none", 512), seed=0)
    for _ in range(STEPS):
        teacher.step(rows, 0, kind="sft")
    (work / ADAPTER_WEIGHTS).write_bytes(teacher.files()[ADAPTER_WEIGHTS])
    del teacher
    exact = gradient(with_adapter(wide, "none", work), rows)
    served: list[float] = []
    plain = exact
    for way in WAYS:
        learner = with_adapter(folder, way, work)
        trained = flat(learner.logprobs_of(answers))
        with learner.as_version(None):
            base = flat(learner.logprobs_of(answers))
        with learner.doubled():
            doubled = flat(learner.logprobs_of(answers))
        served = served or trained
        agreement = parity(Readings(served, trained, base, doubled), mean_k3(served, trained))
        own = gradient(learner, rows)
        plain = own if way == "none" else plain
        yield (
            f"{way}: cosine to fp32 {cosine(own, exact):.4f}, to the files' precision {cosine(own, plain):.4f}, norm "
            f"{own.norm() / exact.norm():.3f} of fp32's; k3 {agreement.k3:.2g} nats a token, served share "
            f"{agreement.share:.2f} ± {agreement.error:.2f}: {agreement.why_not(None) or 'passes'}"
        )


def fresh_gradients(folder: Path, work: Path, ways: list[Quantisation]) -> Iterator[str]:
    """Yield a line for each way to have the base."""
    wide = work / "fp32"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(wide)
    ids = AutoTokenizer.from_pretrained(folder)(__doc__ or "")["input_ids"][: 4 * SPOKEN]
    rows = [row(ids[start : start + SPOKEN], 1, str(start)) for start in range(0, len(ids), SPOKEN)]
    exact = gradient(Learner.fresh(wide, settings("none", 512), seed=0), rows)
    for way in ways:
        learner = Learner.fresh(wide if way != "none" else folder, settings(way, 512), seed=0)
        own = gradient(learner, rows)
        yield f"{way}: cosine to fp32 {cosine(own, exact):.4f}, norm {own.norm() / exact.norm():.3f} of fp32's"


def sampled(folder: Path) -> list[Answer]:
    """Return answers that the model samples to PROMPTS as its files are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    torch.manual_seed(0)
    for text in PROMPTS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        made = model.generate(torch.tensor([prompt]), do_sample=True, top_k=0, max_new_tokens=SPOKEN)[0].tolist()
        answers.append(Answer("", tuple(prompt), tuple(made[len(prompt) :])))
    return answers


def as_row(answer: Answer, advantage: float, name: str) -> Row:
    """Return the row of an answer."""
    made = row([*answer.prompt_ids, *answer.token_ids], len(answer.prompt_ids), name)
    return dataclasses.replace(made, advantages_T=tuple(advantage * one for one in made.advantages_T))


def with_adapter(folder: Path, way: Quantisation, work: Path) -> Learner:
    """Return a learner with the adapter of `work` and a new optimizer."""
    learner = Learner.fresh(folder, settings(way, 512), seed=0)
    learner._load_weights(work)
    return learner


def gradient(learner: Learner, rows: list[Row]) -> Tensor:
    """Return the gradient of a step as one vector: ten times the first moment of AdamW."""
    learner.step(rows, 0, kind="sft")
    moments = safetensors.torch.load(learner.files()[OPTIMIZER_STATE])
    return torch.cat([moments[name].flatten().double() for name in sorted(moments) if name.startswith("exp_avg.")])


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two vectors."""
    return float(one @ other / (one.norm() * other.norm()))


def flat(logprobs: list[list[float]]) -> list[float]:
    """Return the logprobs of all answers as one list."""
    return [one for answer in logprobs for one in answer]


def peaks(folder: Path, tokens: int, ways: list[Quantisation]) -> Iterator[str]:
    """Yield a line for each way to have the base."""
    for way in ways:
        peak = in_own_process(__spec__.name, [str(folder), way, str(tokens)])
        planned = step_bytes(read(str(folder)), settings(way, tokens), tokens, accelerator=False)
        yield (
            f"{folder.name} {way}, {tokens} tokens: loading {peak.loading / MIB:.0f} MiB, step {peak.step / MIB:.0f}, "
            f"counted {peak.counted / MIB:.0f}; planned {planned.total / MIB:.0f} (base {planned.base / MIB:.0f}), "
            f"{planned.total / peak.step - 1:+.1%} of the step's peak, {planned.total / peak.counted - 1:+.1%} of what "
            f"was counted; {peak.seconds:.0f} s of processor time"
        )


def main() -> None:
    """Print the table that the arguments choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=("gradients", "fresh", "peaks"))
    parser.add_argument("model", nargs="?", metavar="FOLDER|SIZE")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    if arguments.one:
        folder, way, tokens = arguments.one
        ids = [3 + place * 7919 % 40000 for place in range(int(tokens))]
        show(of_step(Path(folder), [row(ids, 1)], settings(way, int(tokens))))
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(arguments.model)
        if arguments.model in QWEN:
            config = Qwen2Config(**QWEN[arguments.model].config())
            folder = saved(Path(work) / arguments.model, Qwen2ForCausalLM, config, torch.bfloat16)
        if arguments.table == "gradients":
            lines = gradients(folder, Path(work))
        elif arguments.table == "fresh":
            lines = fresh_gradients(folder, Path(work), arguments.only)
        else:
            lines = peaks(folder, arguments.tokens, arguments.only)
        for line in lines:
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
