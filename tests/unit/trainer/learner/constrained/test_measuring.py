"""What is measured before a step: with whose weights, however it is cut, and without a trace in the learner."""

import random
from pathlib import Path

import pytest
import safetensors.torch
import torch

from trainer.adapters import files
from trainer.domain.constraints import Constraints
from trainer.domain.measured import MeasuredRows
from trainer.domain.rows import Row, SampledCompletion, merge
from trainer.errors import RowError
from trainer.learner.learner import Learner
from whetstone.config.trainer import TrainerSettings

SETTINGS = TrainerSettings(threads=1, device="cpu", learning_rate=1e-3)
KINDS = (
    None,
    Constraints(top_p=0.8),
    Constraints(top_k=5, frequency_penalty=0.4, repetition_penalty=1.2),
    Constraints(logit_bias=((3, 2.0),), min_tokens=4, stop_token_ids=(9,)),
    Constraints(grammar="tools"),
)


def some_rows(learner: Learner, version: int, seed: int = 0) -> list[Row]:
    """Conversations of three turns with a common first prompt, whose tokens the learner could have sampled."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(64) for _ in range(40))
    rows = []
    for name in range(6):
        read, completions = prompt, []
        for turn in range(3):
            # Far likelier ones than a draw from the whole vocabulary, so that most are in any support.
            answer: tuple[int, ...] = ()
            for _ in range(4):
                candidates = [rng.randrange(10, 64) for _ in range(8)]
                logprobs = [learner.logprobs((*read, *answer), (one,))[0] for one in candidates]
                answer = (*answer, candidates[logprobs.index(max(logprobs))])
            raw = learner.logprobs(read, answer)
            kind = KINDS[(name + turn) % len(KINDS)]
            # A grammar that left everything at the first two tokens, and almost nothing at the others.
            shift = [0.0, 0.0, 3.0, 3.0] if kind is not None and kind.grammar else [0.0] * 4
            logprobs = tuple(min(0.0, one + by) for one, by in zip(raw, shift, strict=True))
            completions.append(SampledCompletion(f"{name}-{turn}", read, answer, logprobs, version, 1.0, kind))
            read = (*read, *answer, *(rng.randrange(64) for _ in range(3)))
        rows += merge(str(name), completions, rng.uniform(-1, 1))
    return rows


@pytest.fixture(scope="module")
def moved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2 of an adapter."""
    folder = tmp_path_factory.mktemp("moved")
    learner = Learner.fresh(tiny_model, SETTINGS, seed=1)
    for version in (1, 2):
        learner.step(learner.measure(some_rows(learner, version - 1), version - 1, {}).rows, version - 1)
        files.write(folder / f"p@v{version}", learner, parent=version - 1, step=version)
    return folder


def resumed(tiny_model: Path, moved: Path, **settings: object) -> Learner:
    return Learner.resume(tiny_model, moved / "p@v2", SETTINGS.model_copy(update=settings))


def test_measures_and_steps_add_up_however_they_are_cut(tiny_model: Path, moved: Path) -> None:
    rows = some_rows(resumed(tiny_model, moved), 2)
    results: list[tuple[MeasuredRows, dict[str, torch.Tensor]]] = []
    for settings in ({}, {"micro_batch_tokens": 64}, {"trees": False}, {"trees": False, "micro_batch_tokens": 150}):
        learner = resumed(tiny_model, moved, **settings)
        measured = learner.measure(rows, 2, {})
        figures = learner.step(measured.rows, 2)
        assert figures.sampled_tokens == sum(sum(row.sampled_T) for row in measured.rows)
        results.append((measured, safetensors.torch.load(learner.files()["adapter_model.safetensors"])))
    (first, weights), *others = results
    assert 0 < sum(first.decided.values()) < first.tokens
    for measured, its_weights in others:
        assert (measured.decided, measured.left_out) == (first.decided, first.left_out)
        assert [row.sampled_T for row in measured.rows] == [row.sampled_T for row in first.rows]
        assert [row.constrained for row in measured.rows] == [row.constrained for row in first.rows]
        for name, weight in weights.items():
            torch.testing.assert_close(its_weights[name], weight, rtol=0, atol=2e-5)


def test_a_grammar_decides_where_it_left_little_and_its_other_logprobs_are_the_trainers(
    tiny_model: Path, moved: Path
) -> None:
    learner = resumed(tiny_model, moved)
    rows = [row for row in some_rows(learner, 2) if any(span.constraints.grammar for span in row.constrained)]
    for row in learner.measure(rows, 2, {}).rows:
        for span in row.constrained:
            if span.constraints.grammar:
                assert row.sampled_T[span.start : span.end] == (True, True, False, False)
                ours = learner.logprobs(row.token_ids_T[: span.start], row.token_ids_T[span.start : span.end])
                assert row.inference_logprobs_T[span.start : span.end] == pytest.approx(ours, abs=1e-5)


def test_measuring_leaves_the_learner_as_it_was_and_an_older_version_measures_as_itself(
    tiny_model: Path, moved: Path
) -> None:
    older = Learner.resume(tiny_model, moved / "p@v1", SETTINGS)
    rows = some_rows(older, 1)
    by_itself = older.measure(rows, 1, {})
    learner = resumed(tiny_model, moved)
    before = learner.files()
    by_another = learner.measure(rows, 2, {1: moved / "p@v1"})
    assert learner.files() == before
    assert by_another.decided == by_itself.decided
    assert [row.constrained for row in by_another.rows] == [row.constrained for row in by_itself.rows]
    assert learner.measure(rows, 1, {}).rows != by_itself.rows  # its own weights would measure something else


def test_the_base_model_measures_what_version_0_sampled(tiny_model: Path, moved: Path) -> None:
    base = Learner.fresh(tiny_model, SETTINGS, seed=1)
    rows = some_rows(base, 0)
    measured = resumed(tiny_model, moved).measure(rows, 2, {0: None})
    assert [row.constrained for row in measured.rows] == [row.constrained for row in base.measure(rows, 0, {}).rows]


def test_where_the_adapter_is_gone_or_another_the_trajectory_is_left_out(tiny_model: Path, moved: Path) -> None:
    learner = resumed(tiny_model, moved)
    rows = some_rows(learner, 1)
    # All six have a truncation or a grammar somewhere.
    assert learner.measure(rows, 2, {}).left_out == {row.trajectory_id for row in rows}
    assert learner.measure(rows, 2, {1: moved / "nothing"}).rows == ()
    small = Learner.fresh(tiny_model, SETTINGS.model_copy(update={"lora_rank": 4}), seed=1)
    files.write(moved / "small", small, parent=0, step=1)
    assert learner.measure(rows, 2, {1: moved / "small"}).rows == ()


def test_a_sampled_token_outside_of_the_support_is_weighed_and_counted(tiny_model: Path, moved: Path) -> None:
    learner = resumed(tiny_model, moved)
    prompt = (1, 2, 3)
    logprobs = [learner.logprobs(prompt, (token,))[0] for token in range(64)]
    best, worst = logprobs.index(max(logprobs)), logprobs.index(min(logprobs))
    counted = []
    for token in (best, worst):
        completion = SampledCompletion("c", prompt, (token,), (-0.1,), 2, 1.0, Constraints(top_k=1))
        measured = learner.measure(merge("t", [completion], 1.0), 2, {})
        counted.append((measured.decided["c"], measured.disagreements, len(measured.rows)))
    assert counted == [(1, 0, 0), (0, 1, 1)]


def test_the_mismatch_is_measured_without_a_grammars_tokens(tiny_model: Path, moved: Path) -> None:
    learner = resumed(tiny_model, moved)
    prompt, answer = (1, 2, 3), (4, 5)
    logprobs = tuple(one + 0.05 for one in learner.logprobs(prompt, answer))  # it left 95 % at each
    of_grammar = SampledCompletion("c", prompt, answer, logprobs, 2, 1.0, Constraints(grammar="tools"))
    figures = learner.step(learner.measure(merge("t", [of_grammar], 1.0), 2, {}).rows, 2)
    assert (figures.mismatch_k3, figures.fresh_share, figures.sampled_tokens) == (None, 1.0, 2)


def test_constrained_rows_are_measured_before_they_are_trained(tiny_model: Path, moved: Path) -> None:
    learner = resumed(tiny_model, moved)
    rows = some_rows(learner, 2)
    with pytest.raises(RowError, match="not measured"):
        learner.step(rows, 2)
