"""What `/metrics` tells: of calls, of what waits, of steps, of vLLM; every name of it is described, and true."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sqlalchemy import Engine, event, update

from migrations import schema
from proxy.errors import NotFound, RateLimited
from proxy.metrics import rejections
from proxy.metrics.exposition import OF_LAST_STEP, exposition, queues_of, steps_of, traffic_of
from proxy.metrics.store import MetricTables
from proxy.metrics.traffic import Traffic
from proxy.metrics.vllm import relabelled
from tests.conftest import Seed
from tests.unit.proxy.conftest import FakeVllm, RunningProxy, make_call, make_choice, wait_for
from whetstone.database.engine import connect
from whetstone.observability import metric_names

FIGURES: dict[str, Any] = {
    "loss": -0.25, "reward_mean": 0.5, "advantage_spread": 0.4, "kl": 0.01, "entropy": 2.0, "masked_share": 0.125,
    "decided_share": 0.25, "support_disagreements": 2, "state_share": 0.75, "effective_share": 0.5,
    "mismatch_k3": 1e-5, "grad_norm": 3.0, "learning_rate": 1e-3, "tokens_per_s": 40.0, "seconds": 5.0,
    "completions": 16, "rows": 4, "read_tokens": 900, "sampled_tokens": 200, "phases": {"train": 3.5, "write": 0.25},
}  # fmt: skip


def step(seed: Seed, number: int, state: str = "promoted", policy: str = "starter", **values: Any) -> None:
    ended = None if state == "claimed" else seed.now + timedelta(seconds=number)
    row = {
        "project": "default", "id": f"{policy}#{number}", "policy": policy, "number": number, "state": state,
        "version_in": 0, "groups": 1, "trajectories": 2, "config": {}, "attempt": 1, "created_at": seed.now,
        "ended_at": ended,
    }  # fmt: skip
    seed.insert(schema.steps, **(row | values))


def metrics(tables: MetricTables) -> dict[tuple[str, ...], float]:
    """Samples by name, policy and the other label's value, as Prometheus reads them."""
    by_key: dict[tuple[str, ...], float] = {}
    for sample in samples(steps_of(tables.steps())):
        others = [value for label, value in sample.labels.items() if label != "policy"]
        by_key[sample.name, sample.labels.get("policy", ""), *others] = sample.value
    return by_key


def samples(families: list[Metric]) -> list[Sample]:
    """As Prometheus reads them, of the figures that are described."""
    read = text_string_to_metric_families(exposition(families).decode())
    return [sample for family in read for sample in family.samples if not sample.name.startswith("process_")]


def figures(families: list[Metric], name: str) -> dict[tuple[str, ...], float]:
    """Label values, in the order of the description, -> figure, of one name."""
    (labels,) = {one.labels for one in metric_names.ALL if name in one.series_names}
    by_key = (one for one in samples(families) if one.name == name)
    return {tuple(one.labels[label] for label in (*labels, "le") if label in one.labels): one.value for one in by_key}


@pytest.fixture
def tables(engine: Engine, seed: Seed) -> MetricTables:
    assert seed.engine is engine
    return MetricTables(engine, ["default"])


def test_the_last_steps_figures_stand_under_their_names(tables: MetricTables, seed: Seed) -> None:
    step(seed, 1, **(FIGURES | {"loss": 99.0, "sampled_tokens": 1000}))
    step(seed, 2, **FIGURES)
    by_key = metrics(tables)
    for column, name in OF_LAST_STEP.items():
        assert by_key[name, "starter"] == FIGURES[column], column
    assert by_key["whetstone_step_rows", "starter", "no"] == 16
    assert by_key["whetstone_step_rows", "starter", "yes"] == 4
    assert by_key["whetstone_step_phase_seconds", "starter", "train"] == 3.5
    assert by_key["whetstone_step_sampled_tokens_total", "starter"] == 1200


def test_steps_and_discarded_groups_are_counted_by_state_and_reason(tables: MetricTables, seed: Seed) -> None:
    step(seed, 1, discarded={"stale": 2})
    step(seed, 2, "rejected", discarded={"stale": 1, "group_uniform": 4})
    step(seed, 3, "noop")
    step(seed, 4)
    by_key = metrics(tables)
    assert by_key["whetstone_steps_total", "starter", "promoted"] == 2
    assert by_key["whetstone_steps_total", "starter", "rejected"] == 1
    assert by_key["whetstone_steps_total", "starter", "noop"] == 1
    assert by_key["whetstone_groups_discarded_total", "starter", "stale"] == 3
    assert by_key["whetstone_groups_discarded_total", "starter", "group_uniform"] == 4


def test_what_a_step_did_not_measure_is_left_out(tables: MetricTables, seed: Seed) -> None:
    assert {name for name, *_ in metrics(tables) if name.startswith("whetstone_step_")} == {
        "whetstone_step_sampled_tokens_total"
    }
    step(seed, 1, **(FIGURES | {"mismatch_k3": None, "loss": 0.0}))
    by_key = metrics(tables)
    assert ("whetstone_step_mismatch_k3", "starter") not in by_key
    assert by_key["whetstone_step_loss", "starter"] == 0.0


def test_a_step_under_way_counts_once_it_is_over(tables: MetricTables, seed: Seed, engine: Engine) -> None:
    step(seed, 1, **FIGURES)
    step(seed, 2, "claimed")
    assert metrics(tables)["whetstone_steps_total", "starter", "promoted"] == 1
    with engine.begin() as connection:
        ended = update(schema.steps).where(schema.steps.c.number == 2)
        connection.execute(ended.values(state="promoted", ended_at=seed.now, loss=0.75, sampled_tokens=7))
    by_key = metrics(tables)
    assert by_key["whetstone_steps_total", "starter", "promoted"] == 2
    assert by_key["whetstone_step_loss", "starter"] == 0.75
    assert by_key["whetstone_step_sampled_tokens_total", "starter"] == 207


def test_a_scrape_reads_only_what_has_ended_since_the_one_before(
    tables: MetricTables, seed: Seed, engine: Engine
) -> None:
    for number in range(1, 301):
        step(seed, number, **FIGURES)
    first = metrics(tables)
    fetched = []

    def count(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "FROM steps" in statement:
            fetched.append(statement)

    event.listen(engine, "after_cursor_execute", count)
    assert metrics(tables) == first
    assert len(fetched) == 1 and "steps.number >" in fetched[0]
    step(seed, 301, **FIGURES)
    assert metrics(tables)["whetstone_steps_total", "starter", "promoted"] == 301


def test_policies_are_told_apart_and_other_projects_are_not_told(
    tables: MetricTables, seed: Seed, engine: Engine
) -> None:
    seed.project("other")
    step(seed, 1, project="other", **FIGURES)
    seed.insert(
        schema.policies, project="default", id="second", base_model="second@v0", model_path="/m", live_version=0,
        next_version=1, next_step=2, state="training", created_at=seed.now,
    )  # fmt: skip
    step(seed, 1, "failed", policy="second")
    with engine.begin() as connection:
        connection.execute(update(schema.policies).where(schema.policies.c.id == "starter").values(live_version=3))
    by_key = metrics(tables)
    assert {key for key, count in by_key.items() if key[0] == "whetstone_steps_total" and count} == {
        ("whetstone_steps_total", "second", "failed")
    }
    assert by_key["whetstone_steps_total", "starter", "failed"] == 0, "a counter that begins at 1 hides the first"
    assert (by_key["whetstone_live_version", "starter"], by_key["whetstone_live_version", "second"]) == (3, 0)


def test_a_policy_that_another_server_answers_for_has_no_steps_to_tell(tables: MetricTables, seed: Seed) -> None:
    seed.insert(
        schema.policies, project="default", id="teacher", base_model="gpt", model_path="", live_version=0,
        next_version=1, next_step=1, state="recording", created_at=seed.now, upstream="openai",
    )  # fmt: skip
    assert [one.policy for one in tables.steps()] == ["starter"]


def test_a_running_proxy_tells_of_steps(proxy: RunningProxy) -> None:
    text = proxy.client.get("/metrics").text
    assert 'whetstone_live_version{policy="starter"} 0.0' in text
    assert "whetstone_unwritten_calls 0.0" in text


def test_calls_are_counted_by_policy_and_end_and_their_times_by_bounds() -> None:
    traffic = Traffic()
    now_s = time.time() + 1
    choice = make_choice(token_ids=[1, 2, 3])
    traffic.note([
        make_call("a", created_at_s=now_s, ttft_ms=30.0, total_ms=200.0, choices=(choice,), prompt_token_ids=[1] * 7),
        make_call("b", created_at_s=now_s, ttft_ms=None, total_ms=40.0, choices=(choice,), prompt_token_ids=[1] * 7),
        make_call("c", created_at_s=now_s, status="aborted", ttft_ms=10.0, total_ms=9e9, choices=()),
        make_call("d", created_at_s=now_s - 3600, total_ms=1.0),  # a dead process left it
    ])  # fmt: skip
    metrics = traffic_of(traffic, {"header": 3})
    assert figures(metrics, "whetstone_recorded_calls_total") == {
        ("starter", "chat.completions", "complete"): 2,
        ("starter", "chat.completions", "aborted"): 1,
    }
    assert figures(metrics, "whetstone_sampled_tokens_total") == {("starter",): 6}
    firsts = {of[1]: count for of, count in figures(metrics, "whetstone_first_token_seconds_bucket").items()}
    assert (firsts["0.01"], firsts["0.025"], firsts["0.05"], firsts["+Inf"]) == (1, 1, 2, 2)
    assert figures(metrics, "whetstone_call_seconds_count") == {("starter",): 2}
    assert figures(metrics, "whetstone_call_seconds_sum") == {("starter",): pytest.approx(0.24)}
    assert figures(metrics, "whetstone_calls_total") == {("header",): 3}


def test_calls_of_several_policies_at_once_count_as_one_by_one() -> None:
    now_s = time.time() + 1
    calls = [
        make_call(
            f"c{number}", policy=f"p{number % 3}", created_at_s=now_s, ttft_ms=number * 9.0, total_ms=0.1 * number
        )
        for number in range(20)
    ]
    at_once, one_by_one = Traffic(), Traffic()
    at_once.note(calls)
    for call in calls:
        one_by_one.note([call])
    assert at_once.snapshot() == one_by_one.snapshot()


def test_a_request_of_several_prompts_counts_once_and_all_its_tokens() -> None:
    traffic, now_s = Traffic(), time.time() + 1
    choice = (make_choice(token_ids=[1, 2]),)
    traffic.note([
        make_call("a", created_at_s=now_s, choices=choice),
        make_call("b", created_at_s=now_s, choices=choice, first_id="a"),
    ])  # fmt: skip
    metrics = traffic_of(traffic, {})
    assert sum(figures(metrics, "whetstone_recorded_calls_total").values()) == 1
    assert figures(metrics, "whetstone_sampled_tokens_total") == {("starter",): 4}


def test_refusals_are_counted_by_status_and_code() -> None:
    before = figures(traffic_of(Traffic(), {}), "whetstone_refused_requests_total")
    for error in (NotFound("x"), NotFound("y"), RateLimited("z", 1, [])):
        rejections.note(error)
    after = figures(traffic_of(Traffic(), {}), "whetstone_refused_requests_total")
    assert sum(after.values()) - sum(before.values()) == 3
    assert {status for status, _ in after} >= {"404", "429"}


def test_what_waits_is_told_by_who_it_waits_for(engine: Engine, seed: Seed) -> None:
    now = seed.now + timedelta(seconds=100)
    seed.group("open-1")
    for number, at_s in enumerate((10, 40)):
        seed.group(f"scored-{number}", state="scored", closed_at=seed.now + timedelta(seconds=at_s))
    seed.group("due", state="closed", closed_at=now, judge_due_at=now)
    seed.group("over", state="trained", closed_at=seed.now)
    seed.trajectory("open-t", "open-1", placed_at=seed.now)
    seed.trajectory("ended-t", "open-1", state="ended", created_at=seed.now + timedelta(seconds=30))
    seed.feedback("nobody", 1.0, due_at=now)
    for reason in (
        "no such trajectory in this project",
        "no such group in this project",
        "its weighted parts make a reward",
    ):
        seed.feedback("never", 1.0, state="failed", reason=reason)
    long_ago = now - timedelta(hours=25)
    seed.feedback("never", 1.0, state="failed", reason="no such trajectory in this project", created_at=long_ago)
    step(seed, 1, "claimed", lease_until=seed.now + timedelta(seconds=90))
    metrics = queues_of(MetricTables(engine, ["default"]).queues(now))
    assert figures(metrics, "whetstone_groups") == {
        ("starter", "open"): 1, ("starter", "closed"): 1, ("starter", "scored"): 2, ("starter", "claimed"): 0,
    }  # fmt: skip
    assert figures(metrics, "whetstone_group_waits_seconds") == {
        ("starter", "closed"): 0.0,
        ("starter", "scored"): 90.0,
    }
    assert figures(metrics, "whetstone_groups_waiting_for_judges") == {("starter",): 1}
    assert figures(metrics, "whetstone_open_trajectories") == {(): 1}
    assert figures(metrics, "whetstone_assembly_lag_seconds") == {(): 70.0}
    assert figures(metrics, "whetstone_feedback_waiting") == {(): 1}
    assert figures(metrics, "whetstone_feedback_without_target") == {(): 2}
    assert figures(metrics, "whetstone_step_running_seconds") == {("starter",): 100.0}
    assert figures(metrics, "whetstone_step_silent_seconds") == {("starter",): 10.0}
    assert figures(metrics, "whetstone_policy_state") == {("starter", "training"): 1.0}


def test_where_nothing_waits_that_is_told_too(engine: Engine, seed: Seed) -> None:
    metrics = queues_of(MetricTables(engine, ["default"]).queues(seed.now))
    assert set(figures(metrics, "whetstone_groups").values()) == {0}
    assert figures(metrics, "whetstone_assembly_lag_seconds") == {(): 0.0}
    assert figures(metrics, "whetstone_step_running_seconds") == {("starter",): 0.0}


def test_judges_are_told_by_what_they_took(engine: Engine, seed: Seed) -> None:
    day = {"policy": "starter", "judge": "strong", "calls": 10, "refused": 2, "failed": 1, "tokens": 500}
    for number in (1, 2):
        seed.insert(schema.judge_days, project="default", day=f"2026-01-0{number}", cost_usd=0.25, **day)
    seed.insert(schema.rubrics, project="default", id="r", text="better is better")
    for number, (seconds, cached_from) in enumerate(((2.0, None), (6.0, None), (None, "j0"))):
        seed.insert(
            schema.judgements, project="default", id=f"j{number}", group_id="g", policy="starter", attempts_hash="h",
            place=number, section=0, purpose="reward", state="accepted", judge="strong", rubric_hash="r", calls=1,
            refusals=0, left_out=0, prompt_tokens=1, completion_tokens=1, seconds=seconds, cached_from=cached_from,
            created_at=seed.now, accepted_at=seed.now,
        )  # fmt: skip
    metrics = queues_of(MetricTables(engine, ["default"]).queues(seed.now + timedelta(minutes=5)))
    assert figures(metrics, "whetstone_judge_calls_total") == {
        ("starter", "strong", "accepted"): 14, ("starter", "strong", "refused"): 4, ("starter", "strong", "failed"): 2,
    }  # fmt: skip
    assert figures(metrics, "whetstone_judge_tokens_total") == {("starter", "strong"): 1000}
    assert figures(metrics, "whetstone_judge_cost_usd_total") == {("starter", "strong"): 0.5}
    assert figures(metrics, "whetstone_judge_seconds") == {("strong", "mean"): 4.0, ("strong", "most"): 6.0}


def test_what_waits_is_found_by_indexes_on_what_is_not_over(engine: Engine, seed: Seed) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cursor, statement, *_: statements.append(statement))
    MetricTables(engine, ["default"]).queues(seed.now)
    for index_s_condition in ("state = 'open'", "placed_at IS NULL", "state = 'waiting'"):
        assert any(index_s_condition in statement for statement in statements), index_s_condition


def test_no_history_is_read_however_long_it_is(sqlite_url: str) -> None:
    """By SQLite's plans: PostgreSQL's follow from what is in the tables."""
    engine = connect(sqlite_url)
    statements: list[tuple[str, Any]] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _cursor, text, values, *_: statements.append((text, values))
    )
    MetricTables(engine, ["default"]).queues(datetime.now(UTC))
    with engine.connect() as connection:
        for statement, values in [one for one in statements if one[0].startswith("SELECT")]:
            for *_, step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values):
                if step.startswith(("SEARCH groups", "SCAN groups")):
                    assert "state=?" in step, (statement, step)
                elif step.startswith("SCAN trajectories"):
                    assert "ix_trajectories_open" in step, (statement, step)
                else:
                    assert not step.startswith(("SCAN feedback", "SCAN steps", "SCAN judgements", "SCAN completions"))
    engine.dispose()


SERVER_TEXT = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="starter@v0"} 3.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="starter@v0"} 99.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="starter@v0"} 1.7e+09
# HELP vllm:e2e_request_latency_seconds Histogram of e2e request latency in seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.3",model_name="starter@v0"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="starter@v0"} 2.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="starter@v0"} 2.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="starter@v0"} 4.5
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 5.0
"""


def test_what_the_servers_tell_is_passed_on_with_their_address() -> None:
    metrics = relabelled({"http://a:1": SERVER_TEXT, "http://b:1": SERVER_TEXT, "http://c:1": b"<html>no metrics {"})
    assert sorted({one.name for one in samples(metrics)}) == [
        "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum", "vllm:num_requests_running", "vllm:prompt_tokens_total",
    ]  # fmt: skip
    of_replicas = {
        one.labels["replica"]: one.value for one in samples(metrics) if one.name == "vllm:prompt_tokens_total"
    }
    assert of_replicas == {"http://a:1": 99.0, "http://b:1": 99.0}


@pytest.mark.stack
def test_a_real_server_tells_all_that_is_passed_on(real_proxy: RunningProxy) -> None:
    statements = {"model": "starter", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    assert real_proxy.client.post("/v1/chat/completions", json=statements).status_code == 200
    text = real_proxy.client.get("/metrics").text
    for named in metric_names.VLLM:
        for name in named.series_names:
            assert f"\n{name}{{" in text, name


def test_every_figure_that_is_told_is_described_and_the_other_way_round(
    proxy: RunningProxy, fake_vllm: FakeVllm, seed_of_all: None
) -> None:
    def speak(handler: Any, body: dict[str, Any]) -> None:
        type(handler).speak(handler, body)

    fake_vllm.script = speak
    assert proxy.chat(stream=True).status_code == 200
    assert proxy.client.get("/v1/nowhere").status_code == 404
    wait_for(lambda: "whetstone_recorded_calls_total{" in proxy.client.get("/metrics").text)
    described = {one.name: one for one in (*metric_names.PROXY, *metric_names.PROCESS, *metric_names.DATABASE)}
    families = {one.name: one for one in text_string_to_metric_families(proxy.client.get("/metrics").text)}
    assert families.keys() == described.keys()
    for name, family in families.items():
        named = described[name]
        assert family.type == named.kind and family.documentation, name
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                assert sample.name in named.series_names, name
                assert sorted(sample.labels.keys() - {"le"}) == sorted(named.labels), name
        assert family.samples or name in SELDOM, name


SELDOM = {
    "whetstone_capture_completeness", "whetstone_group_waits_seconds", "whetstone_groups_waiting_for_judges",
    "whetstone_judge_calls", "whetstone_judge_cost_usd", "whetstone_judge_seconds", "whetstone_judge_tokens",
    "whetstone_groups_discarded", "whetstone_handover_share", "whetstone_spent_usd", "whetstone_spending_cap_usd",
}  # fmt: skip
"""What a short run has no sample of."""


@pytest.fixture
def seed_of_all(proxy: RunningProxy) -> None:
    step(Seed(proxy.engine), 1, **FIGURES)
