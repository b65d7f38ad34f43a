"""Write the frozen database of scored groups that `killed` trains on, and compare what two runs left."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, select

from benchmarks.kit.harness import present
from migrations import schema
from whetstone.config.settings import Settings
from whetstone.domain.ids import version_id
from whetstone.registry.adapters import MANIFEST, OPTIMIZER_STATE, AdapterDamaged, verify

GROUPS_PER_STEP, SIZE, TURNS = 3, 4, 2
PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 24, 16, 256

Speak = Callable[[list[int], list[int]], list[float]]
"""Logprobs of an answer after a prompt, by the base model."""


def freeze(engine: Engine, settings: Settings, steps: int, speak: Speak) -> None:
    """Write the policies, which train, and scored groups for `steps` steps of each, all sampled by version 0."""
    rng = random.Random(settings.seed)
    began = datetime.now(UTC) - timedelta(hours=1)
    with engine.begin() as connection:
        connection.execute(schema.projects.insert().values(id=settings.project, created_at=began))
        for policy in settings.trained:
            _policy(connection, settings, policy, began)
            for number in range(steps * GROUPS_PER_STEP):
                name = f"g{number:03d}" if policy == settings.policy else f"{policy}-g{number:03d}"
                ours = {"project": settings.project, "policy": policy}
                # They are taken in this order.
                _group(connection, ours, name, began + timedelta(seconds=number), rng, speak)


def _policy(connection: Connection, settings: Settings, policy: str, at: datetime) -> None:
    of_project, name = {"project": settings.project, "created_at": at}, version_id(policy, 0)
    columns = {
        "base_model": name, "model_path": settings.model, "live_version": 0, "next_version": 1, "next_step": 1,
        "state": "training",
    }  # fmt: skip
    connection.execute(schema.policies.insert().values(id=policy, **of_project, **columns))
    version = {"policy": policy, "version": 0, "state": "live", "served": True, "promoted_at": at}
    connection.execute(schema.policy_versions.insert().values(id=name, **of_project, **version))


def _group(
    connection: Connection, of_policy: dict[str, str], name: str, at: datetime, rng: random.Random, speak: Speak
) -> None:
    ours = {**of_policy, "created_at": at}
    group = {"formed_by": "header", "state": "scored", "size": SIZE, "rewarded": SIZE, "compared_with": "group"}
    connection.execute(schema.groups.insert().values(id=name, closed_at=at, **ours, **group))
    for member in range(SIZE):
        trajectory_id = f"{name}-{member}"
        trajectory = {
            "group_id": name, "split": "train", "no_train": False, "state": "rewarded", "reward": rng.random(),
            "first_version": 0, "last_version": 0, "completions": TURNS, "sampled_tokens": TURNS * ANSWER_TOKENS,
            "last_seen_at": at, "ended_at": at, "tail_completion_id": f"{trajectory_id}-{TURNS - 1}",
        }  # fmt: skip
        connection.execute(schema.trajectories.insert().values(id=trajectory_id, **ours, **trajectory))
        whole: list[int] = []
        for turn in range(TURNS):
            prompt, answer = _random_ids(rng, PROMPT_TOKENS), _random_ids(rng, ANSWER_TOKENS)
            completion_id, before = f"{trajectory_id}-{turn}", f"{trajectory_id}-{turn - 1}" if turn else None
            completion = {
                "upstream_id": f"chatcmpl-{completion_id}", "call_id": completion_id, "choice": 0, "turn": turn,
                "policy_version": 0, "endpoint": "chat.completions", "streamed": False, "status": "complete",
                "trajectory_id": trajectory_id, "follows": before, "prompt_token_ids": prompt, "token_ids": answer,
                "inference_logprobs": speak(whole + prompt, answer), "sampling": {"temperature": 1.0},
                "prompt_tokens": len(whole) + len(prompt), "completion_tokens": len(answer), "threaded_by": "header",
            }  # fmt: skip
            connection.execute(schema.completions.insert().values(id=completion_id, **ours, **completion))
            whole += prompt + answer


def _random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


@dataclass(frozen=True)
class Step:
    """A step in SQL, and the files of the version that it made."""

    number: int
    state: str
    attempt: int
    figures: tuple[Any, ...]
    """Figures that must not depend on kills: groups, tokens, loss, entropy, kl, gradient."""
    taught: dict[str, float | None]
    """Trajectory -> advantage."""
    files: dict[str, bytes]
    """The adapter's files, without the manifest, which has version numbers; empty if they are not complete."""


@dataclass(frozen=True)
class Ledger:
    """What a run left."""

    steps: tuple[Step, ...]
    groups: Counter[str]
    """State -> number of groups."""
    trained_in: dict[str, int | None]
    """Trajectory -> its recorded training step."""
    live: tuple[int, ...]
    """Live versions."""


FIGURES = (
    "groups",
    "trajectories",
    "sampled_tokens",
    "reward_mean",
    "loss",
    "entropy",
    "kl",
    "masked_share",
    "grad_norm",
)


def ledger(engine: Engine) -> Ledger:
    """Read the ledger of a run from SQL and its adapter files."""
    s, m, g = schema.steps.c, schema.step_trajectories.c, schema.groups.c
    t, v = schema.trajectories.c, schema.policy_versions.c
    with engine.connect() as connection:
        folders = {row.version: row.adapter_path for row in connection.execute(select(v.version, v.adapter_path))}
        members = connection.execute(select(m.step_id, m.trajectory_id, m.advantage)).all()
        steps = tuple(
            Step(
                number=row.number,
                state=row.state,
                attempt=row.attempt,
                figures=tuple(getattr(row, name) for name in FIGURES),
                taught={one.trajectory_id: one.advantage for one in members if one.step_id == row.id},
                files=_files(folders.get(row.version_out)),
            )
            for row in connection.execute(select(schema.steps).order_by(s.number))
        )
        return Ledger(
            steps=steps,
            groups=Counter(connection.execute(select(g.state)).scalars()),
            trained_in={row.id: row.trained_in_step for row in connection.execute(select(t.id, t.trained_in_step))},
            live=tuple(connection.execute(select(v.version).where(v.state == "live")).scalars()),
        )


def _files(folder: str | None) -> dict[str, bytes]:
    with suppress(AdapterDamaged):
        if folder is not None:
            verify(Path(folder))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != MANIFEST}
    return {}


def wrong_with(run: Ledger, steps: int) -> list[str]:
    """Return the faults of one run: each step must be there once, each group and trajectory in one of them."""
    numbers = [step.number for step in run.steps]
    taught = Counter(name for step in run.steps for name in step.taught)
    twice = sorted(name for name, times in taught.items() if times > 1)
    step_of = {name: step.number for step in run.steps for name in step.taught}
    return [
        *present({f"steps {numbers}, not 1 to {steps}": numbers != list(range(1, steps + 1))}),
        *(f"step {step.number} is {step.state}" for step in run.steps if step.state != "promoted"),
        *(f"step {step.number} left no whole adapter" for step in run.steps if not step.files),
        *present(
            {
                f"groups: {dict(run.groups)}": run.groups != Counter(trained=steps * GROUPS_PER_STEP),
                f"in more than one step: {twice}": twice,
                "trajectories and steps do not agree on who was trained where": step_of != run.trained_in,
                f"live are {list(run.live)}": len(run.live) != 1,
            }
        ),
    ]


def differences(undisturbed: Ledger, killed: Ledger) -> list[str]:
    """Return the differences of the two runs."""
    faults = []
    for one, other in zip(undisturbed.steps, killed.steps, strict=False):
        pairs = zip(FIGURES, one.figures, other.figures, strict=True)
        # When retention removes an older version's optimizer state depends on the clock.
        aged = {OPTIMIZER_STATE} - (one.files.keys() & other.files.keys())
        names = sorted((one.files.keys() | other.files.keys()) - aged)
        figures = ", ".join(f"{name} {a} != {b}" for name, a, b in pairs if a != b)
        step = f"step {one.number}"
        faults += present(
            {
                f"{step} trained on other trajectories, or with other advantages": one.taught != other.taught,
                f"{step}: {figures}": figures,
                **{f"{step}: {name} differs": one.files.get(name) != other.files.get(name) for name in names},
            }
        )
    first, second = len(undisturbed.steps), len(killed.steps)
    return [*faults, *present({f"{first} steps undisturbed, {second} with kills": first != second})]
