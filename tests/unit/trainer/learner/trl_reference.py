"""Executed in TRL's environment: batches in, the losses and gradients of TRL's own code out.

    trl_reference.py losses|gradients|preferences|divergences|distillations FOLDER

FOLDER holds `cases.json`, with TRL's settings of each case, and `given.safetensors`, with tensors named after the
case's place. `answers.safetensors` is written beside them.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import DPOTrainer, KTOTrainer

from benchmarks.learning import trl_trainer
from trainer.domain.rows import Row


def losses(case: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of a batch in so many micro-batches, and its gradient by the log probability of each token (B, T).

    Only the forward pass is left out: the log probabilities are given.
    """
    model = AutoModelForCausalLM.from_pretrained(case["model"])
    trainer = trl_trainer.make(model, "cpu", *_kind(case), gradient_accumulation_steps=case["parts"], **case["trl"])
    logprobs_BT = given["logprobs"].requires_grad_()
    total = torch.zeros(())
    for rows in torch.arange(len(logprobs_BT)).chunk(case["parts"]):
        read = logprobs_BT[rows]
        trainer._get_per_token_logps_and_entropies = lambda *_, read=read, **__: (read, torch.zeros_like(read), None)
        batch = {name: value[rows] for name, value in given.items() if name != "logprobs"}
        ids = torch.zeros_like(batch["completion_mask"])
        batch |= {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids}
        batch["num_items_in_batch"] = (given["completion_mask"] * given["tool_mask"]).sum()
        total = total + trainer.compute_loss(trainer.model, batch)
    total.backward()
    return {"loss": total.detach(), "gradient": logprobs_BT.grad}


def gradients(case: dict[str, Any], _given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of rows, and its gradient by each weight of a LoRA, everything of it TRL's."""
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(case["model"]), case["adapter"], is_trainable=True
    )
    trainer = trl_trainer.make(model, "cpu", **case["trl"])
    batch = trl_trainer.inputs([Row(**row) for row in case["rows"]], case["step_tokens"], "cpu")
    ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], 1) for of in ("ids", "mask"))
    with torch.no_grad(), model.disable_adapter():
        batch["ref_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, mask, batch["completion_ids"].shape[1]
        )
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **grads}


def preferences(case: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of TRL's KTOTrainer or DPOTrainer, and its gradient by the log probability of each token (B, T).

    Only the forward pass is left out. For KTO the answers that its KL is over are the batch's own.
    """
    logprobs_BT, mask_BT = given["logprobs"].requires_grad_(), given["mask"]
    zeros_BT = torch.zeros_like(mask_BT)
    read = SimpleNamespace(
        log_probs=logprobs_BT * mask_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool(), aux_loss=None
    )
    whole_BT = torch.nn.functional.pad(mask_BT, (1, 0))  # nothing predicts the first token
    batch = {"input_ids": whole_BT, "attention_mask": whole_BT, "completion_mask": whole_BT}
    theirs_B = (given["reference"] * mask_BT).sum(1)
    if case["kind"] == "kto":
        batch |= {f"KL_{name}": value for name, value in batch.items()}
        batch |= {"label": given["good"], "ref_logps": theirs_B, "ref_KL_logps": theirs_B}
    else:
        batch |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), theirs_B.chunk(2), strict=True))
    kind = {"kto": KTOTrainer, "dpo": DPOTrainer}[case["kind"]]
    trainer = kind.__new__(kind)
    fixed = {
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(cpu=True),
        "calculate_KL": True,
        "precompute_ref_logps": True,
        "aux_loss_enabled": False,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "use_weighting": False,
        "loss_type": "kto",
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (fixed | case["trl"]).items():
        setattr(trainer, name, value)
    loss = trainer._compute_loss(lambda **_: read, batch, return_outputs=False)
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs_BT.grad}


def divergences(case: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """SDPO's divergence at each token from the K likeliest tokens and the rest, its sum, and the sum's gradient."""
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    student_SK = given["student"].requires_grad_()
    each_S = compute_divergence(add_tail_bucket(student_SK), add_tail_bucket(given["teacher"]), case["alpha"])
    each_S.sum().backward()
    return {"each": each_S.detach(), "gradient": student_SK.grad}


def distillations(case: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss of TRL's distillation from all logits, and its gradient by the student's hidden states.

    With `top`, as from a teacher's server: its likeliest tokens and the rest.
    """
    hidden_SH = given["hidden"].requires_grad_()
    if case["top"] is None:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        mask_1S = torch.full((1, len(hidden_SH)), 1.0)
        loss, _, _ = _chunked_divergence_loss(
            hidden_SH[None], given["teacher_hidden"][None], given["head"], given["teacher_head"], mask_1S, case["alpha"]
        )
    else:
        from trl.experimental.server_distillation import server_distillation_trainer as server

        teacher_SV = (given["teacher_hidden"] @ given["teacher_head"].T).log_softmax(-1)
        teacher_SK, ids_SK = teacher_SV.topk(case["top"])
        student_SK = (hidden_SH @ given["head"].T).log_softmax(-1).gather(-1, ids_SK)
        every = torch.full_like(student_SK, True, dtype=torch.bool)
        (student_SC, valid), (teacher_SC, _) = (
            server._add_tail_bucket(some, every) for some in (student_SK, teacher_SK)
        )
        loss = server._jsd_divergence(student_SC, teacher_SC, case["alpha"], valid).sum(-1).mean()
    loss.backward()
    return {"loss": loss.detach(), "gradient": hidden_SH.grad}


def _kind(case: dict[str, Any]) -> tuple[Any, ...]:
    """TRL's class for the case and its configuration, where it is not GRPO's."""
    if not case.get("dppo"):
        return ()
    from trl.experimental.dppo import DPPOConfig, DPPOTrainer

    return DPPOTrainer, DPPOConfig


def main() -> None:
    """Answer every case."""
    what, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    given = safetensors.torch.load_file(folder / "given.safetensors")
    answers = {}
    for place, case in enumerate(json.loads((folder / "cases.json").read_text())):
        mine = {name.partition("/")[2]: value for name, value in given.items() if name.startswith(f"{place}/")}
        answers |= {f"{place}/{name}": value.contiguous() for name, value in what(case, mine).items()}
    safetensors.torch.save_file(answers, folder / "answers.safetensors")


if __name__ == "__main__":
    main()
