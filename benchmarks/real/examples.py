"""List the examples that a model learns in some twenty minutes on two cores: the novice plays their small form."""

from typing import Any

from benchmarks.real.task import EXAMPLES, Task

NOVICE = EXAMPLES / "novice" / "model"
OF_EXAMPLES = EXAMPLES.parent / ".venv-examples" / "bin" / "python"
"""The interpreter of the apps that need more than the stock client."""


def _example(name: str, right: str, steps: int, *training: str, **fields: Any) -> Task:
    app = EXAMPLES / name / "app.py"
    return Task(
        name,
        app,
        right,
        steps,
        training=training or ("--pause-s", "0.2"),
        model=NOVICE,
        full=("--size", "full"),
        **fields,
    )


EXAMPLE_TASKS = {
    task.name: task
    for task in (
        _example("2048", "reached the target", steps=24, fields="shaped reward"),
        _example("temporal_clue", "all letters right", steps=30, fields="right letters"),
        _example("codenames", "won", steps=30, fields="margin"),
        _example("mcp", "solved", steps=30, fields="reward"),
        _example("mail", "right answer and source", steps=30, fields="reward"),
    )
}
