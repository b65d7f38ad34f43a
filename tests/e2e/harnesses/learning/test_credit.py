"""The walks on which credit by step is measured."""

import pytest

from benchmarks.learning import credit
from trainer.domain.row_builder import build_rows
from whetstone.config.settings import load

pytestmark = pytest.mark.slow


def test_turns_after_the_decisive_one_get_no_credit() -> None:
    walks = credit.Walker(credit.STARTER, 0).walk(2, turns=3)
    assert [len(prompt) for prompt, _, _ in walks[0]] == sorted(len(prompt) for prompt, _, _ in walks[0])
    (answer, other) = (walk[1][1] for walk in walks)
    if answer == other:
        walks[1][1] = (walks[1][1][0], answer + 1, walks[1][1][2])
    members = [credit.member(str(number), "g", walk, 1, answer, 0, True) for number, walk in enumerate(walks)]
    by_trajectory = {
        row.trajectory_id: [gap for gap, own in zip(row.advantages_T, row.sampled_T, strict=True) if own]
        for row in build_rows(members, 8192).rows
    }
    assert by_trajectory == {"0": [0.5, 0.5, 0.0], "1": [-0.5, -0.5, 0.0]}


def test_a_run_ends_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "TURNS", 2)
    monkeypatch.setattr(credit, "EVALUATED", 20)
    settings = load(environment={}, trainer__threads=1, trainer__learning_rate=credit.LEARNING_RATE)
    attempts, curve = credit.learn(settings, 0, by_step=True, most_steps=1)
    assert attempts is None and len(curve) == 1 and 0 <= curve[0] < credit.ENOUGH
