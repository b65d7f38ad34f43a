"""What admins read: the promised columns, in plain SQL, without the encoding."""

import json
import shutil
import sqlite3
import subprocess
from datetime import timedelta

import pytest
from sqlalchemy import inspect, text

from migrations import schema
from migrations.views import VIEWS, Kind

PROMISED = {
    "admin_policies": "policy base_model live_version state created_at",
    "admin_versions": "policy version parent state reason step probe_k3 created_at promoted_at",
    "admin_completions": (
        "completion_id upstream_id trajectory_id turn choice policy policy_version endpoint status call_id follows "
        "key_id end_user new_messages response_text why_not_trained prompt_token_ids token_ids inference_logprobs "
        "sampling finish_reason prompt_tokens completion_tokens ttft_ms total_ms retry_of threaded_by "
        "created_at redactions day"
    ),
    "admin_trajectories": (
        "trajectory_id group_id policy task split state reward reward_source first_version last_version completions "
        "sampled_tokens why_not_trained trained_in_step metadata created_at ended_at prompt_hash day"
    ),
    "admin_groups": "group_id policy formed_by state reason size rewarded reward_mean reward_spread closed_at",
    "admin_feedback": (
        "feedback_id target_kind target_id trajectory_id reward rewards parts source comment state reason step "
        "created_at key_id day"
    ),
    "admin_steps": (
        "policy step state version_in version_out groups trajectories reward_mean loss kl entropy mismatch_k3 "
        "grad_norm sampled_tokens tokens_per_s seconds created_at day"
    ),
    "admin_judgements": (
        "judgement_id group_id trajectory_id judge score explanation rubric_hash cost_usd tokens created_at day"
    ),
    "admin_rubrics": "rubric_hash text parts",
    "admin_step_trajectories": "policy step trajectory_id group_id reward advantage baseline staleness",
    "admin_judge_days": "policy day judge calls refused failed tokens cost_usd",
    "admin_judge_drift": "policy day groups pairs agreement difference",
    "admin_keys": ("key_id name scopes created_at expires_at revoked_at last_used_at requests_per_min tokens_per_min"),
    "admin_erasures": "erasure_id kind target trajectories completions versions asked_at finished_at",
    "admin_reviews": "trajectory_id group_id policy task reward reward_source review_at",
    "admin_conversations": "trajectory_id turn completion_id messages prompt_token_ids",
}


POSTGRESQL = {
    Kind.TEXT: {"TEXT"},
    Kind.INTEGER: {"INTEGER"},
    Kind.LARGE_INTEGER: {"BIGINT"},
    Kind.REAL: {"DOUBLE PRECISION", "FLOAT"},
    Kind.BOOLEAN: {"BOOLEAN"},
    Kind.TIME: {"TIMESTAMP WITH TIME ZONE"},
    Kind.JSON: {"JSONB"},
    Kind.TOKEN_IDS: {"INTEGER[]"},
    Kind.LOGPROBS: {"REAL[]"},
}


def rows(engine, query, **values):
    with engine.connect() as connection:
        return [dict(row._mapping) for row in connection.execute(text(query), values)]


def decoded(value):
    return json.loads(value) if isinstance(value, str) else value


@pytest.mark.parametrize("view", PROMISED)
def test_a_view_has_the_promised_columns_and_the_project(engine, view):
    columns = {column["name"] for column in inspect(engine).get_columns(view)}
    assert {"project", *PROMISED[view].split()} <= columns
    assert rows(engine, f"SELECT * FROM {view}") == []


def test_the_words_tell_every_view_and_every_column_of_it_and_no_other(engine):
    there = {
        view: [column["name"] for column in inspect(engine).get_columns(view)]
        for view in inspect(engine).get_view_names()
    }
    assert {view.name: [column.name for column in view.columns] for view in VIEWS} == there


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_view_and_each_of_its_columns_have_words_that_fit_a_line(view):
    assert view.purpose and len(view.purpose) <= 120
    assert [column.name for column in view.columns if not 2 < len(column.meaning) <= 120] == []
    assert [column.name for column in view.columns if column.meaning.startswith(("P", "J", "T", "W"))] == []


def test_postgresql_has_the_types_that_are_told_and_keeps_the_words(engine, database_kind):
    if database_kind == "sqlite":
        pytest.skip("SQLite has no types of views, and keeps no comments")
    purposes = "SELECT relname, obj_description(oid, 'pg_class') AS said FROM pg_class WHERE relkind = 'v'"
    said = {row["relname"]: row["said"] for row in rows(engine, purposes)}
    for view in VIEWS:
        assert said[view.name] == view.purpose
        for column, told in zip(inspect(engine).get_columns(view.name), view.columns, strict=True):
            assert column["type"].compile(engine.dialect) in POSTGRESQL[told.kind], f"{view.name}.{told.name}"
            assert column["comment"] == told.meaning


def test_days_are_those_of_utc_whatever_the_session_thinks(engine, seed, database_kind):
    late = seed.now.replace(hour=23, minute=59)
    seed.trajectory("t", created_at=late, turns=0)
    seed.completion("t", 0, created_at=late)
    seed.feedback("t", 1.0, created_at=late)
    with engine.connect() as connection:
        if database_kind == "postgresql":
            connection.execute(text("SET LOCAL TIME ZONE 'Asia/Tokyo'"))
        for view in ("admin_trajectories", "admin_completions", "admin_feedback"):
            assert connection.execute(text(f"SELECT day FROM {view}")).scalars().all() == ["2026-01-01"]


def test_what_a_step_took_of_a_trajectory_is_told(engine, seed):
    seed.insert(
        schema.steps, project="default", id="starter#3", policy="starter", number=3, state="promoted", version_in=0,
        groups=1, trajectories=1, config={}, attempt=1, created_at=seed.now,
    )  # fmt: skip
    seed.insert(
        schema.step_trajectories, project="default", step_id="starter#3", trajectory_id="t", policy="starter",
        group_id="g", reward=1.0, advantage=0.5, staleness=2,
    )  # fmt: skip
    assert rows(engine, "SELECT * FROM admin_step_trajectories") == [
        {"project": "default", "policy": "starter", "step": 3, "trajectory_id": "t", "group_id": "g", "reward": 1.0}
        | {"advantage": 0.5, "baseline": None, "staleness": 2}
    ]


def test_a_completion_reads_as_lists_and_objects(engine, seed, database_kind):
    seed.trajectory("t")
    (row,) = rows(engine, "SELECT * FROM admin_completions")
    assert decoded(row["token_ids"]) == [3, 4]
    assert decoded(row["inference_logprobs"]) == [-0.5, -0.25]
    assert decoded(row["new_messages"]) == [{"role": "user", "content": "question 0"}]
    assert decoded(row["sampling"]) == {"temperature": 1.0}
    if database_kind == "postgresql":
        assert isinstance(row["token_ids"], list)


def test_a_conversation_is_joined_along_what_it_follows(engine, seed):
    seed.trajectory("t", turns=3)
    seed.completion("t", 3, follows=None, new_messages=[{"role": "user", "content": "afresh"}], prompt_token_ids=[9])
    query = "SELECT * FROM admin_conversations WHERE project = 'default' AND trajectory_id = 't' ORDER BY turn"
    first, _, third, fresh = rows(engine, query)
    assert decoded(first["messages"]) == [{"role": "user", "content": "question 0"}]
    assert decoded(third["messages"]) == [
        {"role": "user", "content": "question 0"},
        {"role": "assistant", "content": "answer 0"},
        {"role": "user", "content": "question 1"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "question 2"},
    ]
    assert decoded(third["prompt_token_ids"]) == [1, 2, 3, 4, 11, 12, 13, 14, 21, 22]
    assert decoded(fresh["messages"]) == [{"role": "user", "content": "afresh"}]
    assert decoded(fresh["prompt_token_ids"]) == [9]


def test_a_conversation_keeps_its_order_however_long_and_whatever_its_messages_hold(engine, seed):
    seed.trajectory("t", turns=0)
    said = []
    for turn in range(30):
        new = [
            {"role": "tool", "content": 'a "quoted" \\ line\nü', "n": turn},
            {"role": "user", "content": [{"type": "text", "text": "[]"}], "strict": None, "flag": True},
        ]
        seed.completion("t", turn, new_messages=new, prompt_token_ids=list(range(turn * 20, turn * 20 + 12)))
        said += [*new, {"role": "assistant", "content": f"answer {turn}"}]
    (last,) = rows(engine, "SELECT * FROM admin_conversations WHERE completion_id = 't-29'")
    assert decoded(last["messages"]) == said[:-1]
    tokens = decoded(last["prompt_token_ids"])
    assert len(tokens) == 30 * 12 + 29 * 2
    assert [token for token in tokens if token % 20 < 2][-2:] == [580, 581]


def test_one_trajectorys_conversation_costs_nothing_for_the_others(engine, seed, database_kind):
    if database_kind == "postgresql":
        pytest.skip("read from SQLite's plan, which has no statistics to depend on")
    query = "EXPLAIN QUERY PLAN SELECT * FROM admin_conversations WHERE project = 'default' AND trajectory_id = 't'"
    scans = [row["detail"] for row in rows(engine, query) if row["detail"].startswith("SCAN")]
    assert not [scan for scan in scans if "completions" in scan or scan == "SCAN c"]


def test_a_scored_trajectory_of_a_policy_that_does_not_train_says_so(engine, seed):
    seed.project("other", policy_state="recording")
    for project in ("default", "other"):
        seed.trajectory("t", project=project, why_not_trained="waiting_step")
    why = {row["project"]: row["why_not_trained"] for row in rows(engine, "SELECT * FROM admin_trajectories")}
    assert why == {"default": "waiting_step", "other": "policy_not_training"}


def test_plain_sqlite3_reads_every_view(tmp_path, sqlite_template):
    with sqlite3.connect(sqlite_template) as plain:
        for view in PROMISED:
            assert plain.execute(f"SELECT count(*) FROM {view} WHERE project = 'x'").fetchone() == (0,)
    plain.close()
    program = shutil.which("sqlite3")
    if program:
        output = subprocess.run(
            [program, str(sqlite_template), "SELECT * FROM admin_conversations"], check=True, capture_output=True
        )
        assert output.stderr == b""


def test_times_are_in_utc_and_compare_as_text(engine, seed):
    seed.trajectory("t", created_at=seed.now + timedelta(hours=1))
    query = "SELECT count(*) AS n FROM admin_trajectories WHERE created_at > '2026-01-01 12:30:00+00'"
    assert rows(engine, query) == [{"n": 1}]
