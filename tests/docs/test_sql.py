"""docs/sql.md: each query runs on both databases, and gives what it promises."""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from migrations import schema
from migrations.views import BY_NAME
from tests.conftest import Seed
from whetstone.cli.tables.sql_query import asking
from whetstone.cli.tables.table_formats import json_lines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sql.md"
Row = list[Any]


def queries() -> list[tuple[str, str]]:
    """Question and query of every block, in order."""
    pairs, question = [], ""
    for heading, block in re.findall(r"^## ([^\n]+)$|^```sql\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S):
        question = heading or question
        if block:
            pairs.append((question, block))
    return pairs


@pytest.fixture
def filled(seed: Seed) -> Seed:
    """Three days of a support desk: a base model and its versions, three groups, two steps, a judge, thumbs, keys."""
    _keys_and_versions(seed)
    _attempts(seed)
    _feedback_and_judgements(seed)
    _steps(seed)
    return seed


def _keys_and_versions(seed: Seed) -> None:
    for key_id, name in (("k1", "desk"), ("k2", "shop")):
        seed.insert(
            schema.api_keys, project="default", id=key_id, name=name, secret_sha256=f"secret-{key_id}",
            scopes=["inference"], created_at=seed.now,
        )  # fmt: skip
    with seed.engine.begin() as connection:
        connection.execute(schema.policy_versions.update().values(state="retired"))
    for version, state in ((1, "retired"), (2, "live"), (3, "rejected")):
        seed.insert(
            schema.policy_versions, project="default", id=f"starter@v{version}", policy="starter", version=version,
            parent=min(version - 1, 2), state=state, step=version, served=state == "live",
            created_at=seed.now + timedelta(days=version),
        )  # fmt: skip
    seed.insert(
        schema.gate_results, project="default", id="r1", policy="starter", version=2, against=1, test="heldout",
        decision="promote", reason="better by 0.2", created_at=seed.now,
    )  # fmt: skip
    seed.insert(
        schema.gate_results, project="default", id="r2", policy="starter", version=3, against=2, test="heldout",
        decision="reject", reason="worse by 0.4", created_at=seed.now + timedelta(days=2),
    )  # fmt: skip


def _attempts(seed: Seed) -> None:
    def attempt(name: str, version: int, reward: float | None, **values: Any) -> None:
        at = seed.now + timedelta(days=version, minutes=len(name))
        key_id, messages = values.pop("key_id", "k1"), values.pop("messages", None)
        turns: list[dict[str, Any]] = values.pop("turns", [{}])
        state = values.pop("state", "ended" if reward is None else "rewarded")
        seed.trajectory(
            name, turns=0, completions=len(turns), first_version=version, last_version=version, reward=reward,
            state=state, created_at=at, last_seen_at=at, **values,
        )  # fmt: skip
        for number, turn in enumerate(turns):
            answer = {"role": "assistant", "content": f"{name} says {number}"}
            columns = {"response": answer, "key_id": key_id, "policy_version": version}
            if number == 0 and messages:
                columns["new_messages"] = messages
            seed.completion(name, number, created_at=at, **(columns | turn))

    call = {"finish_reason": "tool_calls", "response": {"role": "assistant", "content": None}}
    good, bad = ([{"role": "tool", "content": result}] for result in ("order 7, sent", "Error: no such order"))
    order, refund = ([{"role": "user", "content": f"where is my {what}?"}] for what in ("order", "refund"))
    seed.group("g1", state="trained", step=1, size=2, rewarded=2, reward_mean=0.5, reward_spread=0.5)
    seed.group("g2", state="trained", step=2, size=2, rewarded=2, reward_mean=0.5, reward_spread=0.5)
    seed.group(
        "g3", state="discarded", formed_by="prompt", reason="group_uniform", size=2, rewarded=2, reward_mean=0.0,
        reward_spread=0.0,
    )  # fmt: skip
    tried: dict[str, Any] = {"task": "order", "prompt_hash": "h1", "messages": order, "state": "trained"}
    old, new = {"prompt_version": "v2"}, {"prompt_version": "v3"}
    first: dict[str, Any] = {"group_id": "g1", "trained_in_step": 1}
    second: dict[str, Any] = {"group_id": "g2", "trained_in_step": 2}
    attempt("calm-1", 0, 0.0, turns=[call, {"new_messages": good}], **first, **tried, metadata=old)
    attempt("calm-2", 0, 1.0, turns=[{"ttft_ms": 10.0, "streamed": True}], **first, **tried, metadata=new)
    attempt("eval-1", 0, 0.5, split="eval", why_not_trained="split_eval", task="order")
    tidy = [call, {"new_messages": good, "ttft_ms": 20.0, "streamed": True}]
    attempt("tidy-1", 1, 1.0, turns=tidy, **second, **tried, metadata={"customer": "acme"} | new)
    attempt("tidy-2", 1, 0.0, turns=[call, {"new_messages": bad}], **second, **tried, metadata=new)
    late: dict[str, Any] = {"task": "refund", "prompt_hash": "h2", "messages": refund, "key_id": "k2", "group_id": "g3"}
    attempt("late-1", 2, 0.0, why_not_trained="group_uniform", **late, metadata={"customer": "acme"})
    attempt("late-2", 2, 0.0, why_not_trained="group_uniform", **late, turns=[{"ttft_ms": 30.0, "streamed": True}])
    gone = {"status": "aborted", "why_not_trained": "aborted", "ttft_ms": 90.0, "completion_tokens": 1}
    attempt("mute", 2, None, why_not_trained="no_reward", task="refund", turns=[gone], metadata={"customer": "b"})
    attempt("broken", 2, None, why_not_trained="no_reward", turns=[
        {"status": "error", "why_not_trained": "error", "error": "upstream away", "completion_tokens": 0}
    ])  # fmt: skip


def _feedback_and_judgements(seed: Seed) -> None:
    for target, up in (("calm-1", 0.0), ("calm-2", 1.0), ("tidy-1", 1.0), ("tidy-2", 0.0)):
        seed.feedback(target, up, id=f"t-{target}", source="thumbs", state="used", trajectory_id=target)
    wrong = {"comment": "it was my refund", "parts": {"found": 0, "polite": 0.5}, "source": "parts"}
    seed.feedback("late-1", 0.0, id="p1", state="applied", trajectory_id="late-1", **wrong)
    right = {"parts": {"found": 1, "polite": 0.5}, "source": "parts"}
    seed.feedback("late-2", 0.0, id="p2", state="applied", trajectory_id="late-2", **right)
    unknown = "no such trajectory in this project"
    seed.feedback("nobody", 1.0, id="n1", state="failed", reason=unknown)
    seed.feedback("nobody-2", 1.0, id="n2", state="failed", reason=unknown)
    seed.feedback("calm-2", 0.5, id="n3", state="unused", reason="trained in step 1", trajectory_id="calm-2")
    seed.insert(schema.rubrics, project="default", id="r", text="kind and right")
    for group_id, scores in (("g1", {"calm-1": 0.2, "calm-2": 0.9}), ("g2", {"tidy-1": 0.4, "tidy-2": 0.1})):
        judged = {name: {"score": one, "explanation": f"{name}: {one}", "position": 0} for name, one in scores.items()}
        seed.insert(
            schema.judgements, project="default", id=f"j-{group_id}", group_id=group_id, policy="starter",
            attempts_hash="a", place=0, section=0, purpose="reward", state="accepted", judge="strict", rubric_hash="r",
            scores=judged, calls=1, refusals=0, left_out=0, prompt_tokens=100, completion_tokens=20, cost_usd=0.5,
            created_at=seed.now, accepted_at=seed.now,
        )  # fmt: skip


def _steps(seed: Seed) -> None:
    for number, (group_id, names, staleness) in enumerate(
        (("g1", ("calm-1", "calm-2"), 0), ("g2", ("tidy-1", "tidy-2"), 1)), start=1
    ):
        seed.insert(
            schema.steps, project="default", id=f"starter#{number}", policy="starter", number=number, state="promoted",
            version_in=number - 1, version_out=number, groups=1, trajectories=2, reward_mean=0.5, kl=0.25,
            mismatch_k3=1e-6, seconds=2.5, config={}, attempt=1, created_at=seed.now, kind="grpo",
        )  # fmt: skip
        for place, name in enumerate(names):
            reward = seed.one(schema.trajectories, name).reward
            seed.insert(
                schema.step_trajectories, project="default", step_id=f"starter#{number}", trajectory_id=name,
                policy="starter", group_id=group_id, reward=reward, advantage=2 * reward - 1,
                staleness=staleness * place,
            )  # fmt: skip


UNKNOWN = "no such trajectory in this project"
BY_VERSION: list[Row] = [
    ["2026-01-01", 0, 2, 2, 0.5],
    ["2026-01-02", 1, 2, 2, 0.5],
    ["2026-01-03", 2, 4, 2, 0.0],
]
ASKED: list[Any] = [{"role": "user", "content": "where is my order?"}, {"role": "assistant", "content": None}]
ANSWERS: dict[str, list[list[Row]]] = {
    "What is each version worth, day by day?": [BY_VERSION],
    "The same, at once, over millions of attempts?": [BY_VERSION],
    "Is a version better than the one it was trained from?": [
        [
            ["starter", 0, None, "retired", 3, 0.5, None],
            ["starter", 1, 0, "retired", 2, 0.5, 0.0],
            ["starter", 2, 1, "live", 2, 0.0, -0.5],
        ]
    ],
    "Which attempts were the best?": [
        [
            ["calm-2", 1.0, 0, "calm-2 says 0"],
            ["tidy-1", 1.0, 1, "tidy-1 says 1"],
            ["eval-1", 0.5, 0, "eval-1 says 0"],
        ]
    ],
    "And the worst, and what was said about them?": [
        [
            ["calm-1", 0.0, "calm-1 says 1", None, None],
            ["late-1", 0.0, "late-1 says 0", "parts", "it was my refund"],
            ["late-2", 0.0, "late-2 says 0", None, None],
        ]
    ],
    "What was the whole conversation?": [
        [[1, [*ASKED, {"role": "tool", "content": "order 7, sent"}], "tidy-1 says 1"]]
    ],
    "Why was something not trained on?": [
        [["group_uniform", "rewarded", 2], ["no_reward", "ended", 2], ["split_eval", "rewarded", 1]]
    ],
    "Which answers cannot be trained on at all?": [[["aborted", "aborted", 1], ["error", "error", 1]]],
    "How much feedback comes in, and from whom?": [
        [["2026-01-01", 3, 3, 100.0], ["2026-01-02", 2, 2, 100.0], ["2026-01-03", 4, 2, 50.0]],
        [["thumbs", 4, 4, 0.5], ["reward", 3, 3, 2.5 / 3], ["parts", 2, 2, 0.0]],
    ],
    "Which feedback came to nothing, and why?": [
        [["failed", UNKNOWN, "reward", 2], ["unused", "trained in step 1", "reward", 1]]
    ],
    "Which part of a reward is it that fails?": [[["2026-01-01", 0.5, 0.5]]],
    # calm-1, calm-2 and tidy-2 alike; the judge liked tidy-1 less than people did
    "Do people agree with the judge?": [[["strict", 4, 0.75, 0.65, 0.15]]],
    "What did the judge say about the worst of a group?": [
        [["g1", "calm-1", 0.2, "calm-1: 0.2"], ["g2", "tidy-2", 0.1, "tidy-2: 0.1"]]
    ],
    "What does a task cost?": [
        [
            # calm-1, tidy-1, tidy-2 have two turns (2 + 6 tokens of prompt, 2 + 2 sampled), calm-2 and eval-1 one
            ["order", 5, 28, 16, (28 * 0.1 + 16 * 0.4) / 1e6, 1.0],
            ["refund", 3, 6, 5, (6 * 0.1 + 5 * 0.4) / 1e6, None],
            [None, 1, 2, 0, 2 * 0.1 / 1e6, None],
        ]
    ],
    "Which key used how many tokens?": [[["k1", "desk", 10, 32, 17], ["k2", "shop", 2, 4, 4]]],
    "How long until the first token?": [
        [
            ["2026-01-01", 1, 10.0, 10.0, 10.0],
            ["2026-01-02", 1, 20.0, 20.0, 20.0],
            ["2026-01-03", 2, 60.0, 30.0, 90.0],
        ]
    ],
    "Has tool calling become worse?": [[["starter", 0, 1, 1.0, None], ["starter", 1, 2, 0.5, 0.5]]],
    "What did each step do?": [
        [[1, "promoted", 0, 1, 1, 2, 0.5, 0.25, 1e-6, 2.5], [2, "promoted", 1, 2, 1, 2, 0.5, 0.25, 1e-6, 2.5]]
    ],
    "What did step 2 train on?": [
        [["tidy-1", "g2", 1.0, 1.0, 0, "order"], ["tidy-2", "g2", 0.0, -1.0, 1, "order"]]
    ],
    "How stale is what is trained on?": [[["starter", 1, 2, 0, 0.0, 0], ["starter", 2, 2, 0, 0.5, 1]]],
    "Why was a version turned down or rolled back?": [[["starter", 3, 2, "heldout", "reject", "worse by 0.4"]]],
    "Do groups differ enough to learn from?": [[["header", 2, 0, 0.5], ["prompt", 1, 1, 0.0]]],
    "Which prompts does it never get right?": [[["h2", 2, 0.0, '[{"role":"user","content":"where is my refund?"}]']]],
    "Where are the attempts of one customer?": [
        [
            ["late-1", "refund", 0.0, "group_uniform", "2026-01-03 12:06:00.000000"],
            ["tidy-1", "order", 1.0, None, "2026-01-02 12:06:00.000000"],
        ]
    ],
    "Which version of my prompt is better?": [[["v2", 0, 1, 1, 0.0], ["v3", 0, 1, 1, 1.0], ["v3", 1, 2, 2, 0.5]]],
    "What was broken off, or failed?": [
        [["2026-01-03", "aborted", None, 1], ["2026-01-03", "error", "upstream away", 1]]
    ],
}  # fmt: skip


def test_every_question_of_the_page_has_an_answer_here() -> None:
    questions = [question for question, _ in queries()]
    assert len(set(questions)) >= 20
    assert {question: questions.count(question) for question in questions} == {
        text: len(rows) for text, rows in ANSWERS.items()
    }


def test_the_queries_give_what_the_page_promises_on_both_databases(filled: Seed, database_url: str) -> None:
    given: dict[str, list[list[Row]]] = {}
    for question, query in queries():
        given.setdefault(question, []).append(rows(database_url, query))
    for question, answers in ANSWERS.items():
        assert given[question] == approximately(answers), question


def test_the_queries_ask_only_views() -> None:
    for question, query in queries():
        names = set(re.findall(r"\b(?:FROM|JOIN) ([a-z_]+)", query))
        own = set(re.findall(r"(?:WITH|,) ([a-z_]+) AS \(", query))
        assert names - own <= BY_NAME.keys() and names & BY_NAME.keys(), question


def rows(database_url: str, query: str) -> list[Row]:
    """As `whetstone sql --jsonl` tells them."""
    with asking(database_url, query, timeout_s=60) as (columns, rows):
        return [list(json.loads(line).values()) for line in json_lines(columns, rows)]


def approximately(value: Any) -> Any:
    """Sums of numbers come out in another order on the other database; a JSON text has other spaces."""
    if isinstance(value, list):
        return [approximately(one) for one in value]
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-9)
    return _Json(value) if isinstance(value, str) and value.startswith("[{") else value


class _Json(str):
    """Equal to a text that says the same."""

    __hash__: Callable[[Any], int] = str.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and json.loads(self) == json.loads(other)
