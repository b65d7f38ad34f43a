"""Our losses and gradients against those of TRL's own code, executed in an environment of its own.

TRL 1.16 has the losses of GRPO's family. Its trainer for DPPO was in TRL up to 1.8, which lies beside it for that one
comparison. What TRL does not have is worked from its published formula.
"""

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from torch import Tensor

from trainer.adapters import files
from trainer.domain.rows import Row
from trainer.learner import losses
from trainer.learner.gradient.divergence import divergence
from trainer.learner.gradient.preferences import preference_loss
from trainer.learner.learner import Learner
from trainer.learner.losses import Tokens
from whetstone.config.trainer import LossName, TrainerSettings

MakeRows = Callable[..., list[Row]]

ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = ROOT / ".venv-trl"
REFERENCE = Path(__file__).with_name("trl_reference.py")
LONGEST = 64
"""Tokens: what Dr. GRPO divides by."""

pytestmark = [pytest.mark.slow, pytest.mark.long(part="trl")]

THEIRS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": LONGEST},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
}
"""What TRL calls them."""


def kl_term(weight: float) -> dict[str, Any]:
    """GRPO's own; TRL's default multiplies it by the ratio (arXiv 2512.02556)."""
    return {"beta": weight, "use_bias_correction_kl": False}


@dataclass(frozen=True)
class Case:
    """A random batch of 6 trajectories, each one row, and how it is trained on."""

    name: LossName
    seed: int
    kl_weight: float = 0.0
    parts: int = 1
    """Micro-batches."""

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}-kl{self.kl_weight}-parts{self.parts}"

    def given(self) -> dict[str, Tensor]:
        """Tensors (6, 40), ragged and with holes; ratios that clip on both sides, for gspo those of whole rows."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(spread: float) -> Tensor:
            return torch.randn(6, 40, generator=generator) * spread

        lengths_B = torch.randint(5, 41, (6,), generator=generator)
        inside_BT = torch.arange(40) < lengths_B[:, None]
        sampled_BT = (torch.rand(6, 40, generator=generator) < 0.6) & inside_BT
        sampled_BT[:, 0] = True
        logprobs_BT = -torch.rand(6, 40, generator=generator) * 4 - 0.05
        moved_BT = normal({"gspo": 1e-4, "cispo": 1.5, "dppo_tv": 1.0}.get(self.name, 0.4))
        if self.name == "gspo":
            moved_BT += torch.tensor([1e-3, -1e-3, 0, 0, -1e-3, 1e-3])[:, None]
        return {
            "logprobs": logprobs_BT,
            "old_per_token_logps": (logprobs_BT - moved_BT).clamp(max=0),
            "ref_per_token_logps": logprobs_BT + normal(0.5),
            "completion_mask": inside_BT.long(),
            "tool_mask": sampled_BT.long(),
            "advantages": torch.tensor([1.0, -1.0, 0.3, -0.4, 1.5, -1.4]),
        }

    def theirs(self, model: Path) -> dict[str, Any]:
        """The case as the script reads it."""
        low, high = losses.CLIPS[self.name]
        trl = {**THEIRS[self.name], **kl_term(self.kl_weight), "epsilon": low, "epsilon_high": high}
        return {"model": str(model), "parts": self.parts, "trl": trl}


CASES = [
    Case(name, seed, kl_weight, parts)
    for name in THEIRS
    for seed in range(5)
    for kl_weight, parts in ((0.0, 1), (0.04, 1), (0.04, 3))
]


@pytest.fixture(scope="module")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """TRL's loss and gradient for each of CASES."""
    folder = tmp_path_factory.mktemp("losses")
    return ask("losses", folder, [case.theirs(tiny_model) for case in CASES], [case.given() for case in CASES])


def ask(
    what: str, folder: Path, cases: list[dict[str, Any]], given: list[dict[str, Tensor]], trl: Path | None = None
) -> list[dict[str, Tensor]]:
    """Run the script in TRL's environment; `trl` is a folder with another TRL than its own."""
    python = ENVIRONMENT / "bin" / "python"
    assert python.exists(), f"{ENVIRONMENT.name} is not there: `make test` and `make steps` build it"
    (folder / "cases.json").write_text(json.dumps(cases))
    flat = {f"{place}/{name}": value for place, one in enumerate(given) for name, value in one.items()}
    safetensors.torch.save_file(flat, folder / "given.safetensors")
    path = os.pathsep.join(map(str, [ROOT, *([trl] if trl else [])]))
    run = subprocess.run(
        [python, "-W", "ignore", REFERENCE, what, folder],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    answered = safetensors.torch.load_file(folder / "answers.safetensors")
    return [
        {name.partition("/")[2]: value for name, value in answered.items() if name.startswith(f"{place}/")}
        for place in range(len(cases))
    ]


def ours(
    name: LossName, given: dict[str, Tensor], kl_weight: float = 0.0, tv_regulariser: float = 0.0
) -> dict[str, Any]:
    """Our loss of the batch, its gradient (B, T), and which tokens it masks (S,)."""
    mask_BT = (given["completion_mask"] * given["tool_mask"]).bool()
    rows_S, _ = mask_BT.nonzero(as_tuple=True)
    lengths_B = mask_BT.sum(1)
    logprobs_BT = given["logprobs"].clone().requires_grad_()
    tokens = Tokens(logprobs_BT[mask_BT], given["old_per_token_logps"][mask_BT], given["advantages"][rows_S], rows_S)
    policy = losses.policy_loss(name, None, None, tv_regulariser)(tokens)
    weights_B = torch.tensor(
        [
            losses.weight(
                name,
                trajectory_tokens=length,
                trajectories=len(lengths_B),
                step_tokens=int(lengths_B.sum()),
                max_answer_tokens=LONGEST,
            )
            for length in lengths_B.tolist()
        ]
    )
    kl_S = losses.k3(tokens.trainer_logprobs_S, given["ref_per_token_logps"][mask_BT])
    loss = (policy.losses_S + kl_weight * kl_S) @ weights_B[rows_S]
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradient": logprobs_BT.grad,
        "masked": policy.masked_S,
        "advantages": tokens.advantages_S,
    }


@pytest.mark.parametrize("place", range(len(CASES)), ids=map(str, CASES))
def test_loss_and_gradient_are_trls(place: int, answers: list[dict[str, Tensor]]) -> None:
    case = CASES[place]
    mine = ours(case.name, case.given(), case.kl_weight)
    assert (mine["loss"] - answers[place]["loss"]).abs() <= 2e-6
    assert (mine["gradient"] - answers[place]["gradient"]).abs().max() <= 2e-6
    assert mine["gradient"].abs().max() > 1e-3
    if case.name != "cispo":
        for side in (mine["advantages"] > 0, mine["advantages"] < 0):
            assert 0 < mine["masked"][side].sum() < side.sum()


def test_gspos_gradient_reaches_every_token_of_a_row_alike(answers: list[dict[str, Tensor]]) -> None:
    place = CASES.index(Case("gspo", 0))
    given, gradient_BT = CASES[place].given(), answers[place]["gradient"]
    mask_BT = (given["completion_mask"] * given["tool_mask"]).bool()
    moved = [row[mask] for row, mask in zip(gradient_BT, mask_BT, strict=True) if row.any()]
    assert moved
    for row in moved:
        torch.testing.assert_close(row, row[:1].expand_as(row))


@pytest.fixture(scope="module")
def dppo_batches() -> list[dict[str, Tensor]]:
    """Batches in which probabilities moved by more than 0.2 both ways."""
    return [Case("dppo_tv", seed).given() for seed in range(5)]


def test_dppo_tvs_gradient_is_trls_dppos(
    tiny_model: Path, tmp_path: Path, dppo_batches: list[dict[str, Tensor]]
) -> None:
    # Its ratio is detached and multiplies log π, and it is cut at c: the same gradient up to c, another loss.
    trl = {"divergence_type": "binary_tv", "clip_ratio_c": 1e9, "epsilon": 0.2, "epsilon_high": 0.2}
    case = {"model": str(tiny_model), "parts": 1, "dppo": True, "trl": trl}
    given = [{**one, "sampling_per_token_logps": one["old_per_token_logps"].clone()} for one in dppo_batches]
    theirs = ask("losses", tmp_path, [case] * len(given), given, trl=ENVIRONMENT / "dppo")
    for one, answer in zip(dppo_batches, theirs, strict=True):
        mine = ours("dppo_tv", one)
        for side in (mine["advantages"] > 0, mine["advantages"] < 0):
            assert 0 < mine["masked"][side].sum() < side.sum()
        assert (mine["gradient"] - answer["gradient"]).abs().max() <= 2e-6


def test_dppo_tv_is_prime_rls_published_formula_with_another_regulariser(dppo_batches: list[dict[str, Tensor]]) -> None:
    # prime-rl: -keep·A·r + τ·(log r)², summed over the tokens of the step and divided by their number, where keep is 0
    # for A > 0 and π - μ > δ_high, and for A <= 0 and π - μ < -δ_low. Ours has λ·(π - μ)² in place of τ·(log r)².
    for given in dppo_batches:
        mine = ours("dppo_tv", given, tv_regulariser=1e-3)
        mask_BT = (given["completion_mask"] * given["tool_mask"]).bool()
        count = int(mask_BT.sum())
        total, written_out = 0.0, torch.zeros(6, 40, dtype=torch.float64)
        for row, place in mask_BT.nonzero().tolist():
            log_pi, log_mu = given["logprobs"][row, place].item(), given["old_per_token_logps"][row, place].item()
            advantage = given["advantages"][row].item()
            pi, mu, ratio = math.exp(log_pi), math.exp(log_mu), math.exp(log_pi - log_mu)
            keep = not (pi - mu > 0.2) if advantage > 0 else not (pi - mu < -0.2)
            total += -keep * advantage * ratio + 1e-3 * (pi - mu) ** 2
            written_out[row, place] = (-keep * advantage * ratio + 2e-3 * (pi - mu) * pi) / count
        assert mine["loss"].item() == pytest.approx(total / count, abs=2e-6)
        assert (mine["gradient"] - written_out).abs().max() <= 2e-6


def test_cispo_is_its_papers_formula() -> None:
    # arXiv 2506.13585, equations 4 and 5: sg(min(r, 1 + ε_high))·A·log π, over the number of tokens; no lower bound.
    above = 0
    for seed in range(5):
        given = Case("cispo", seed).given()
        mine = ours("cispo", given)
        mask_BT = (given["completion_mask"] * given["tool_mask"]).bool()
        count = int(mask_BT.sum())
        total, written_out = 0.0, torch.zeros(6, 40, dtype=torch.float64)
        for row, place in mask_BT.nonzero().tolist():
            log_pi, log_mu = given["logprobs"][row, place].item(), given["old_per_token_logps"][row, place].item()
            advantage, ratio = given["advantages"][row].item(), math.exp(log_pi - log_mu)
            above += ratio > 5
            total -= min(ratio, 5.0) * advantage * log_pi
            written_out[row, place] = -min(ratio, 5.0) * advantage / count
        assert mine["loss"].item() == pytest.approx(total / count, abs=2e-6)
        assert (mine["gradient"] - written_out).abs().max() <= 2e-6
    assert above > 10


@pytest.mark.parametrize("kind", ["kto", "dpo"])
def test_losses_and_gradients_of_preferences_are_trls(tmp_path: Path, kind: Literal["kto", "dpo"]) -> None:
    settings = TrainerSettings(preference_beta=0.2, kto_desirable_weight=1.5, kto_undesirable_weight=0.75)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    given = [preferences(seed) for seed in range(20)]
    case = {"kind": kind, "trl": {"beta": 0.2, **(weights if kind == "kto" else {})}}
    theirs = ask("preferences", tmp_path, [case] * len(given), given)
    below = 0
    for one, answer in zip(given, theirs, strict=True):
        mask_BT, good_B = one["mask"].bool(), one["good"].bool()
        rows = [
            preferred(str(place), mask_T.tolist(), good, str(place % 4))
            for place, (mask_T, good) in enumerate(zip(mask_BT, good_B.tolist(), strict=True))
        ]
        policy_B, reference_B = ((one[name] * mask_BT).double().sum(1) for name in ("logprobs", "reference"))
        below += bool((policy_B - reference_B).mean() < 0)
        mine = preference_loss(rows, policy_B.tolist(), reference_B.tolist(), kind, settings)
        gradient_BT = mask_BT * torch.tensor(mine.slopes_R)[:, None]
        assert mine.loss == pytest.approx(answer["loss"].item(), abs=2e-6)
        assert (gradient_BT - answer["gradient"]).abs().max() <= 2e-6
        assert gradient_BT.abs().max() > 1e-3
    assert 0 < below < len(given)  # where KTO's KL is cut at 0, and where it is not


def preferences(seed: int) -> dict[str, Tensor]:
    """8 trajectories of up to 30 tokens with holes: the first 4 are good, each the partner of one of the last 4."""
    generator = torch.Generator().manual_seed(seed)
    logprobs_BT = -torch.rand(8, 30, generator=generator) * 4 - 0.05
    moved_BT = torch.randn(8, 30, generator=generator) * 0.5
    mask_BT = torch.rand(8, 30, generator=generator) < 0.6
    mask_BT[:, 0] = True
    good_B = torch.arange(8) < 4
    return {"logprobs": logprobs_BT, "reference": logprobs_BT - moved_BT, "mask": mask_BT.long(), "good": good_B.long()}


def preferred(name: str, mask_T: list[bool], good: bool, pair: str) -> Row:
    length = len(mask_T) + 1
    return Row(
        trajectory_id=name,
        token_ids_T=(1,) * length,
        sampled_T=(False, *mask_T),
        inference_logprobs_T=(math.nan,) * length,
        versions_T=(-1,) * length,
        temperatures_T=(1.0,) * length,
        advantages_T=(0.0, *((1.0 if good else -1.0) if here else 0.0 for here in mask_T)),
        pair=pair,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_divergence_of_hindsight_and_its_gradient_are_those_of_trls_sdpo(tmp_path: Path, alpha: float) -> None:
    given = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        student_SV, teacher_SV = (torch.randn(12, 40, generator=generator).mul(2).log_softmax(-1) for _ in range(2))
        teacher_SK, ids_SK = teacher_SV.topk(8)
        given.append({"student": student_SV.gather(-1, ids_SK), "teacher": teacher_SK.contiguous()})
    theirs = ask("divergences", tmp_path, [{"alpha": alpha}] * len(given), given)
    for one, answer in zip(given, theirs, strict=True):
        student_SK = one["student"].clone().requires_grad_()
        each_S = divergence(student_SK, one["teacher"], alpha)
        each_S.sum().backward()
        assert student_SK.grad is not None
        assert (each_S.detach() - answer["each"]).abs().max() <= 2e-6
        assert (student_SK.grad - answer["gradient"]).abs().max() <= 2e-6
        assert answer["gradient"].abs().max() > 1e-3


@pytest.mark.parametrize("top", [None, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_loss_of_distillation_and_its_gradient_are_trls(tmp_path: Path, alpha: float, top: int | None) -> None:
    """`top` None: TRL compares the whole vocabulary, and so do we, with all its tokens named."""
    given = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sizes = {"hidden": (12, 16), "teacher_hidden": (12, 24), "head": (40, 16), "teacher_head": (40, 24)}
        given.append({name: torch.randn(size, generator=generator).div(2) for name, size in sizes.items()})
    theirs = ask("distillations", tmp_path, [{"alpha": alpha, "top": top}] * len(given), given)
    for one, answer in zip(given, theirs, strict=True):
        hidden_SH = one["hidden"].clone().requires_grad_()
        student_SV = (hidden_SH @ one["head"].T).log_softmax(-1)
        teacher_SK, ids_SK = (one["teacher_hidden"] @ one["teacher_head"].T).log_softmax(-1).topk(top or 40)
        loss = divergence(student_SV.gather(-1, ids_SK), teacher_SK, alpha).mean()
        loss.backward()
        assert hidden_SH.grad is not None
        assert (loss.detach() - answer["loss"]).abs() <= 2e-6
        assert (hidden_SH.grad - answer["gradient"]).abs().max() <= 2e-6
        assert answer["gradient"].abs().max() > 1e-3


TEMPERATURE = 0.7


def test_the_gradient_of_a_whole_model_is_trls(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    def made(count: int, seed: int) -> list[Row]:
        rows = make_rows(count, seed=seed)
        return [replace(row, temperatures_T=(TEMPERATURE,) * len(row.token_ids_T)) for row in rows]

    rows = made(8, seed=2)
    step_tokens = sum(sum(row.sampled_T) for row in rows)
    cases, mine, figures = [], [], []
    for name, trl in THEIRS.items():
        settings = TrainerSettings(
            threads=1,
            device="cpu",
            loss=name,
            clip_norm=1e9,
            clip_low=0.5,
            clip_high=2.0,
            max_answer_tokens=LONGEST,
            kl_weight=0.3,
            learning_rate=1e-2,
        )
        learner = Learner.fresh(tiny_model, settings, seed=1)
        learner.step(made(6, seed=1), 0)  # without a B that is not zero, A has no gradient
        files.write(tmp_path / name, learner, parent=0, step=1)
        before = moments(learner)
        figures.append(learner.step(rows, 0))
        # Adam: m' = 0.9 m + 0.1 g
        mine.append({weight: (m - 0.9 * before[weight]) / 0.1 for weight, m in moments(learner).items()})
        asked = {**trl, **kl_term(0.3), "temperature": TEMPERATURE, "epsilon": 0.5, "epsilon_high": 2.0}
        case = {"model": str(tiny_model), "adapter": str(tmp_path / name), "trl": asked, "step_tokens": step_tokens}
        cases.append({**case, "rows": [asdict(row) for row in rows]})
    theirs = ask("gradients", tmp_path, cases, [{} for _ in cases])

    for name, case_figures, one, answer in zip(THEIRS, figures, mine, theirs, strict=True):
        assert case_figures.loss == pytest.approx(answer.pop("loss").item(), abs=1e-5), name
        assert one.keys() == answer.keys()
        assert all(value.abs().max() > 1e-6 for value in one.values())
        assert cosine(one, answer) > 0.999999, name
        for weight in one:
            assert cosine({weight: one[weight]}, {weight: answer[weight]}) > 0.9999, f"{name}: {weight}"


def moments(learner: Learner) -> dict[str, Tensor]:
    """The optimizer's first moments, by parameter."""
    state = safetensors.torch.load(learner.files()["optimizer.safetensors"])
    return {name.removeprefix("exp_avg."): m for name, m in state.items() if name.startswith("exp_avg.")}


def cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of all of them together."""
    flat = [torch.cat([tensors[name].flatten().double() for name in sorted(one)]) for tensors in (one, other)]
    return torch.nn.functional.cosine_similarity(*flat, dim=0).item()
