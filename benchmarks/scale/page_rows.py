"""Write the rows that a dashboard shows beyond `rows`: tasks, keys, reasons, versions, steps, judgements, reviews."""

import random
from datetime import datetime, timedelta

from sqlalchemy import Connection, Table, case, func, select, text

from benchmarks.scale.rows import GROUPS, MEMBERS, POLICY, PROJECT, Row, block_name, insert
from migrations import schema

TASKS = ("billing", "search", "code")
KEYS = ("k00000000001", "k00000000002", "k00000000003")
JUDGED = 100
"""Groups of each block that a judge has ranked."""
MEMBERS_OF_A_STEP = 256
REVIEWS = 40
COMPARISON = f"compare-{'0' * 32}"
SAMPLES = 8
"""Answers of each side of the comparison."""

_MEMBERS = text("""
    INSERT INTO step_trajectories (project, step_id, trajectory_id, policy, group_id, reward, advantage, staleness)
    SELECT project, :step_id, id, policy, group_id, reward, reward - 0.5, 0 FROM trajectories
    WHERE project = :project AND id LIKE :block AND state = 'trained' AND reward IS NOT NULL LIMIT :members
""")


def dress(connection: Connection, blocks: int) -> None:
    """Give the first block what its copies need: the newest version, tasks, metadata, keys, reasons."""
    t, c, f = schema.trajectories.c, schema.completions.c, schema.feedback.c
    version = blocks - 1
    of_task = case(*((t.id.like(f"%{digit}"), TASKS[digit % len(TASKS)]) for digit in range(MEMBERS)))
    keys = case(*((c.id.like(f"%-{digit}-c_"), KEYS[digit % len(KEYS)]) for digit in range(MEMBERS)))
    all_of_it = {"first_version": version, "last_version": version, "task": of_task, "metadata": {"customer": "acme"}}
    uniform = {"state": "excluded", "why_not_trained": "group_uniform", "trained_in_step": None}
    bent = uniform | {"why_not_trained": "sampling_bent: top_p"}
    trained = schema.trajectories.update().where(t.state == "trained")
    for update in (
        schema.trajectories.update().values(all_of_it),
        trained.values(trained_in_step=max(1, version)),
        schema.groups.update().where(schema.groups.c.state == "trained").values(step=max(1, version)),
        trained.where(t.id.like("%7-_")).values(uniform),
        trained.where(t.id.like("%11-_")).values(bent),
        schema.completions.update().values(policy_version=version, key_id=keys, ttft_ms=12.5),
        schema.feedback.update().where(f.id.like("%-1-f")).values(source="thumbs", comment="not so good"),
        schema.feedback.update().where(f.id.like("%-2-f")).values(metadata={"rater": "Anna"}),
        schema.feedback.update().where(f.id.like("%-3-f")).values(metadata={"rater": "Ben"}),
    ):
        connection.execute(update)


def add_history(connection: Connection, blocks: int, now: datetime, dice: random.Random) -> None:
    """Add versions and steps, one per block, with their trajectories, judgements, trajectories to review, and a
    comparison."""
    for table, rows in _rows(blocks, now, dice).items():
        insert(connection, table, rows)
    for number in range(1, blocks):
        block = f"{block_name(blocks - 1 - number)}-%"
        values = {"step_id": f"{POLICY}#{number}", "block": block, "members": MEMBERS_OF_A_STEP}
        connection.execute(_MEMBERS, {"project": PROJECT, **values})
    p, t = schema.policies.c, schema.trajectories.c
    connection.execute(schema.policies.update().where(p.id == POLICY).values(next_version=blocks, next_step=blocks))
    newest = select(t.id).where(t.project == PROJECT).order_by(t.created_at.desc()).limit(REVIEWS)
    connection.execute(schema.trajectories.update().where(t.id.in_(newest)).values(review_at=now))
    _add_comparison(connection)


def _add_comparison(connection: Connection) -> None:
    """Add a comparison whose answers are copies of one."""
    c, t = schema.completions.c, schema.trajectories.c
    first = select(schema.completions).where(c.project == PROJECT, c.turn == 0).order_by(c.created_at).limit(1)
    completion = dict(connection.execute(first).one()._mapping)
    of_it = select(schema.trajectories).where(t.project == PROJECT, t.id == completion["trajectory_id"])
    trajectory = dict(connection.execute(of_it).one()._mapping)
    names = [f"{COMPARISON}.{side}{number}" for side in "ab" for number in range(1, SAMPLES + 1)]
    insert(connection, schema.trajectories, [trajectory | {"id": name, "split": "eval"} for name in names])
    own_ids = {name: {"id": f"{name}-c", "trajectory_id": name, "turn_key": None, "history": None} for name in names}
    insert(connection, schema.completions, [completion | own for own in own_ids.values()])


def ids(connection: Connection, count: int, dice: random.Random, blocks: int) -> dict[str, list[str]]:
    """Return ids from all of the history, by their name in the pages' paths."""
    things = [
        (block_name(dice.randrange(blocks)), dice.randrange(GROUPS), dice.randrange(MEMBERS)) for _ in range(count)
    ]
    steps = connection.scalar(select(func.count()).select_from(schema.steps)) or 0
    return {
        "group_id": [f"{block}-g{group}" for block, group, _ in things],
        "trajectory_id": [f"{block}-t{group}-{member}" for block, group, member in things],
        "feedback_id": [f"{block}-t{group}-{member}-f" for block, group, member in things],
        "policy": [POLICY],
        "comparison_id": [COMPARISON],
        "number": [str(dice.randrange(1, steps + 1)) for _ in range(count)],
    }


def _rows(blocks: int, now: datetime, dice: random.Random) -> dict[Table, list[Row]]:
    day = {"policy": POLICY, "judge": "strong", "calls": 2400, "refused": 3, "failed": 1, "tokens": 2_400_000}
    key = {"scopes": ["inference"], "created_at": now, "revoked_at": now}
    numbers = {number: now - timedelta(hours=blocks - 1 - number) for number in range(1, blocks)}
    days = {(now - timedelta(hours=block)).strftime("%Y-%m-%d") for block in range(blocks)}
    return {
        schema.policy_versions: [_version(number, at) for number, at in numbers.items()],
        schema.steps: [_step(number, at, dice) for number, at in numbers.items()],
        schema.rubrics: [{"project": PROJECT, "id": "rubric", "text": "The better answer is the shorter one."}],
        schema.judgements: [
            _judgement(block, group, now - timedelta(hours=block), dice)
            for block in range(blocks)
            for group in range(JUDGED)
        ],
        schema.judge_days: [day | {"project": PROJECT, "day": one, "cost_usd": 4.8} for one in sorted(days)],
        schema.api_keys: [
            key | {"project": PROJECT, "id": name, "name": f"app {number}", "secret_sha256": f"{number:064}"}
            for number, name in enumerate(KEYS)
        ],
    }


def _version(number: int, at: datetime) -> Row:
    rejected = number % 9 == 0
    return {
        "project": PROJECT,
        "id": f"{POLICY}@v{number}",
        "policy": POLICY,
        "version": number,
        "parent": number - 1,
        "state": "rejected" if rejected else "retired",
        "reason": "its held-out mean fell" if rejected else None,
        "step": number,
        "served": False,
        "created_at": at,
        "promoted_at": None if rejected else at,
        "unserved_at": at,
        "removed_at": at,
    }


def _step(number: int, at: datetime, dice: random.Random) -> Row:
    figures = ("reward_mean", "reward_spread", "loss", "kl", "entropy", "mismatch_k3", "grad_norm", "fresh_share")
    return {name: dice.random() for name in figures} | {
        "project": PROJECT,
        "id": f"{POLICY}#{number}",
        "policy": POLICY,
        "number": number,
        "state": "rejected" if number % 9 == 0 else "promoted",
        "version_in": number - 1,
        "version_out": number,
        "groups": MEMBERS_OF_A_STEP // MEMBERS,
        "trajectories": MEMBERS_OF_A_STEP,
        "sampled_tokens": 20_000,
        "tokens_per_s": 1000.0,
        "seconds": 20.0,
        "phases": {"loss": 12.0, "load": 3.0, "probe": 5.0},
        "config": {},
        "attempt": 1,
        "kind": "grpo",
        "loss_function": "dapo",
        "created_at": at,
        "ended_at": at,
    }


def _judgement(block: int, group: int, at: datetime, dice: random.Random) -> Row:
    name, why = block_name(block), "It answers the question."
    scores = {
        f"{name}-t{group}-{member}": {"score": dice.random(), "explanation": why, "position": member}
        for member in range(MEMBERS)
    }
    return {
        "project": PROJECT,
        "id": f"{name}-j{group}",
        "group_id": f"{name}-g{group}",
        "policy": POLICY,
        "attempts_hash": "a",
        "place": 0,
        "section": 0,
        "purpose": "reward",
        "state": "accepted",
        "judge": "strong",
        "model": "a-model",
        "rubric_hash": "rubric",
        "scores": scores,
        "calls": 1,
        "refusals": 0,
        "left_out": 0,
        "prompt_tokens": 900,
        "completion_tokens": 120,
        "cost_usd": 0.002,
        "seconds": 1.5,
        "created_at": at,
        "accepted_at": at,
    }
