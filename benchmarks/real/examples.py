"""List the examples; for those with a small form, the novice learns it in some twenty minutes on two cores."""

from dataclasses import replace

from benchmarks.real.task import EXAMPLES, Task

NOVICE = EXAMPLES / "novice" / "model"
WITH_MORE = EXAMPLES.parent / ".venv-examples" / "bin" / "python"
"""The interpreter of apps that need more than the stock client (`make example` installs it)."""
SUMS = (
    *("--plain", "--max-tokens", "16", "--dataset", "chain_sum"),
    *("--config", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'),
)
"""What SmolLM2-135M can learn of reasoning-gym."""
OF_NOVICE = {"trainer__learning_rate": 4e-3}
"""Four times what its size suggests. At 1e-3 the reward of mail rises half as fast (docs/log/learning.md)."""
BY_JUDGE = ("--judge",)


MINUTES = 25
"""Most minutes of training."""


def _of_novice(name: str, right: str, share: str, steps: int, pause_s: float) -> Task:
    """`pause_s`: so long that hardly any attempt is stale before a step takes it."""
    app, full = EXAMPLES / name / "app.py", ("--size", "full")
    return Task(
        name,
        app,
        right,
        steps,
        pause_s,
        minutes=MINUTES,
        fields=share,
        settings=OF_NOVICE,
        decays=True,
        model=NOVICE,
        full=full,
    )


MAIL = _of_novice("mail", "right answer and source", "right source", steps=48, pause_s=0.8)
EXAMPLE_TASKS = {
    task.name: task
    for task in (
        # Attempts that come to the same board have the same prompt. A game has 7.6 moves: bigger steps take minutes.
        # A third of the attempts is of groups with equal rewards at first, nine in ten late in some seeds: a step waits
        # for its 12 groups no longer than 40 s.
        replace(
            _of_novice("2048", "reached the target", "shaped reward", steps=24, pause_s=4),
            settings=OF_NOVICE
            | {"trainer__baseline": "state", "trainer__max_groups_per_step": 24, "trainer__step_waits_s": 40},
        ),
        replace(
            _of_novice("temporal_clue", "all letters right", "right letters", steps=60, pause_s=0.5),
            settings=OF_NOVICE | {"trainer__groups_per_step": 16, "trainer__step_waits_s": 20},
        ),
        # Some seeds take twenty steps to find anything, and lose it if the rate falls too soon. Once nearly all groups
        # are uniform, a step of four groups may make the policy worse, and is rolled back: a step waits for eight, and
        # training ends after 20 minutes.
        replace(
            _of_novice("codenames", "won", "margin", steps=100, pause_s=1.7),
            minutes=20,
            settings=OF_NOVICE
            | {"trainer__groups_per_step": 16, "trainer__min_groups_per_step": 8, "trainer__step_waits_s": 10},
        ),
        _of_novice("mcp", "solved", "reward", steps=24, pause_s=0.6),
        MAIL,
        replace(MAIL, name="mail-ruler", training=BY_JUDGE, judge=EXAMPLES / "mail" / "rule_judge.py"),
        replace(
            _of_novice("autorl", "the other word", "", steps=14, pause_s=1),
            full=(),
            judge=EXAMPLES.parent / "benchmarks" / "fakes" / "word_judge.py",
            compares=True,
        ),
        Task(
            "reasoning_gym",
            EXAMPLES / "reasoning_gym" / "app.py",
            "right answer",
            20,
            pause_s=2,
            fields="score",
            options=SUMS,
            python=WITH_MORE,
        ),
        replace(MAIL, name="langgraph", app=EXAMPLES / "langgraph" / "app.py", python=WITH_MORE),
    )
}
