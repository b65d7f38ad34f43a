"""The divergence from a teacher: by its formula, and through a whole model in any number of micro-batches."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.adapters import files
from trainer.domain.rows import Answer, Row, rows_for_sft
from trainer.learner.gradient.divergence import divergence
from trainer.learner.learner import Learner
from whetstone.config.trainer import Kind, TrainerSettings

MakeRows = Callable[..., list[Row]]

SETTINGS = TrainerSettings(
    threads=1,
    device="cpu",
    learning_rate=1e-3,
    measure_kl=False,
    hindsight_top=5,
    hindsight_teacher="self",
    hindsight_temperature=1,
)


def corrected(count: int, seed: int) -> list[Row]:
    """Answers of 3 to 8 tokens; the teacher's prompt has 10 more tokens than the student's."""
    rng = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(64) for _ in range(length))

    rows = []
    for place in range(count):
        prompt, correction, answer = ids(12), ids(10), ids(rng.randint(3, 8))
        (row,) = rows_for_sft(f"t{place}", [Answer("", prompt, answer)])
        rows.append(replace(row, teacher_ids=prompt + correction))
    return rows


def logprobs(learner: Learner, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """Log probabilities (N, V) at the answer's tokens, by the model's own forward pass."""
    logits = learner._model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def by_hand(learner: Learner, rows: list[Row], alpha: float, top: int, teacher: Learner | None = None) -> Tensor:
    """The mean over tokens of the divergence over K + 1 classes, each class a probability of its own.

    The teacher is another model after the same prompt, or without one the same model after the corrected prompt.
    """
    total, tokens = torch.zeros(()), 0
    for row in rows:
        start = row.sampled_T.index(True)
        prompt, answer = row.token_ids_T[:start], row.token_ids_T[start:]
        p_NV = logprobs(learner, prompt, answer).exp()
        with torch.no_grad():
            read = (learner, row.teacher_ids, answer) if teacher is None else (teacher, prompt, answer)
            q_NV = logprobs(*read).exp()
        q_NK, ids_NK = q_NV.topk(top)
        q_NC, p_NC = (torch.cat([some, 1 - some.sum(-1, keepdim=True)], -1) for some in (q_NK, p_NV.gather(-1, ids_NK)))
        m_NC = q_NC if alpha == 1 else p_NC if alpha == 0 else (1 - alpha) * p_NC + alpha * q_NC
        from_p, from_q = ((some * (some / m_NC).log()).sum() for some in (p_NC, q_NC))
        total = total + (from_p if alpha == 1 else from_q if alpha == 0 else (1 - alpha) * from_p + alpha * from_q)
        tokens += len(answer)
    return total / tokens


def check_gradient(loss: Tensor, resumed: Learner, model: Path, rows: list[Row], kind: Kind, folder: Path) -> None:
    """Check that a step has the gradient of the loss, which was computed with `resumed` from the same folder."""
    loss.backward()
    whole = torch.cat([weight.grad.flatten() for weight in resumed._trained.values() if weight.grad is not None])
    for tokens in (100_000, 64):
        parted = resumed._settings.model_copy(update={"micro_batch_tokens": tokens})
        stepping = Learner.resume(model, folder, parted)
        figures = stepping.step(rows, 1, kind=kind)
        assert figures.loss == pytest.approx(loss.item(), rel=1e-4)
        assert (figures.mismatch_k3, figures.masked_share, figures.effective_share) == (None, 0, None)
        moments = [stepping._optimizer.state[weight]["exp_avg"] / 0.1 for weight in stepping._trained.values()]
        mine = torch.cat([moment.flatten() for moment in moments])
        assert torch.nn.functional.cosine_similarity(mine, whole, dim=0) > 0.99999
        assert mine.norm() == pytest.approx(whole.norm().item(), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_formula_in_any_number_of_micro_batches(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows, alpha: float
) -> None:
    rows = corrected(8, seed=2)
    settings = SETTINGS.model_copy(update={"clip_norm": 1e9, "hindsight_alpha": alpha})
    learner = Learner.fresh(tiny_model, settings, seed=1)
    learner.step(make_rows(6, seed=1), 0)  # without a B that is not zero, A has no gradient
    files.write(tmp_path / "v1", learner, parent=0, step=1)
    resumed = Learner.resume(tiny_model, tmp_path / "v1", settings)
    loss = by_hand(resumed, rows, alpha, top=5)
    check_gradient(loss, resumed, tiny_model, rows, "hindsight", tmp_path / "v1")


def scored(rows: list[Row], teacher: Learner, top: int) -> list[Row]:
    """The rows with the teacher's likeliest tokens, as another server gives them."""
    with_scores = []
    for row in rows:
        start = row.sampled_T.index(True)
        with torch.no_grad():
            values_NK, ids_NK = logprobs(teacher, row.token_ids_T[:start], row.token_ids_T[start:]).topk(top)
        ids, values = (tuple(map(tuple, some.tolist())) for some in (ids_NK, values_NK))
        with_scores.append(replace(row, teacher_ids=(), top_ids_N=ids, top_logprobs_N=values))
    return with_scores


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_gradient_from_another_model_is_that_of_the_formula(
    tmp_path: Path, tiny_model: Path, make_rows: MakeRows, alpha: float
) -> None:
    settings = SETTINGS.model_copy(update={"clip_norm": 1e9, "distill_alpha": alpha})
    learner = Learner.fresh(tiny_model, settings, seed=1)
    learner.step(make_rows(6, seed=1), 0)
    teacher = Learner.fresh(tiny_model, settings.model_copy(update={"learning_rate": 3e-2}), seed=2)
    for seed in range(4):
        teacher.step(make_rows(6, seed=seed), 0)
    rows = scored(corrected(8, seed=2), teacher, top=7)
    files.write(tmp_path / "v1", learner, parent=0, step=1)
    resumed = Learner.resume(tiny_model, tmp_path / "v1", settings)
    loss = by_hand(resumed, rows, alpha, 7, teacher)
    assert loss > 1e-3
    check_gradient(loss, resumed, tiny_model, rows, "distill", tmp_path / "v1")


def test_steps_bring_the_policy_nearer_to_its_corrected_self(tiny_model: Path) -> None:
    rows = corrected(8, seed=3)
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    with torch.no_grad():
        before = by_hand(learner, rows, 0.5, top=5)
    losses = [learner.step(rows, 0, kind="hindsight").loss for _ in range(8)]
    with torch.no_grad():
        assert by_hand(learner, rows, 0.5, top=5) < before
    assert losses[-1] < losses[0] == pytest.approx(before.item(), rel=1e-4)


def test_the_teacher_may_be_another_version_and_surer(tmp_path: Path, tiny_model: Path, make_rows: MakeRows) -> None:
    rows = [replace(row, teacher_ids=row.token_ids_T[: row.sampled_T.index(True)]) for row in corrected(4, seed=4)]
    fixed = SETTINGS.model_copy(update={"hindsight_teacher": "reference"})
    learner = Learner.fresh(tiny_model, fixed, seed=1)
    assert learner.step(rows, 0, kind="hindsight").loss == pytest.approx(0, abs=1e-6)
    learner.step(make_rows(6, seed=1), 0)
    moved = learner.step(rows, 1, kind="hindsight").loss
    assert moved > 1e-5  # from the base model
    files.write(tmp_path / "v1", learner, parent=0, step=1)
    assert learner.step(rows, 1, kind="hindsight", reference=tmp_path / "v1").loss == pytest.approx(0, abs=1e-6)
    surer = SETTINGS.model_copy(update={"hindsight_temperature": 0.5})
    assert Learner.fresh(tiny_model, surer, seed=1).step(rows, 0, kind="hindsight").loss > 1e-3


def test_without_a_correction_there_is_nothing_to_learn(tiny_model: Path) -> None:
    rows = [replace(row, teacher_ids=row.token_ids_T[: row.sampled_T.index(True)]) for row in corrected(4, seed=4)]
    figures = Learner.fresh(tiny_model, SETTINGS, seed=1).step(rows, 0, kind="hindsight")
    assert figures.loss == pytest.approx(0, abs=1e-6)
    assert figures.grad_norm < 1e-5


def test_tokens_that_are_not_compared_by_themselves_count_as_one() -> None:
    q, p = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.1, 0.2]]).log()
    without_rest = (q.exp() * (q - p)).sum()
    rest = 0.3 * torch.tensor(0.3 / 0.7).log()
    assert divergence(p, q, 0.0).item() == pytest.approx((without_rest + rest).item())
    for alpha in (0.0, 0.5, 1.0):
        assert divergence(p, p, alpha).item() == pytest.approx(0, abs=1e-6)


def test_all_tokens_of_the_vocabulary_may_be_compared() -> None:
    student_SV = torch.tensor([[0.0, 1.0, 2.0]]).log_softmax(-1).requires_grad_()
    each_S = divergence(student_SV, torch.tensor([[2.0, 1.0, 0.0]]).log_softmax(-1), 0.5)
    each_S.sum().backward()
    assert student_SV.grad is not None
    assert torch.isfinite(student_SV.grad).all()
