"""What other companies' servers have cost in a day: judges as stored, upstreams by their tokens; of all projects."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from migrations import schema
from tests.conftest import NOW, Seed
from whetstone.config.settings import Settings
from whetstone.config.spending import Prices
from whetstone.registry.projects import Store
from whetstone.registry.spending import Spending, day_of, next_day, read_spending

PRICES = {"usd_per_million_prompt_tokens": 2.0, "usd_per_million_completion_tokens": 8.0}
UPSTREAMS: dict[str, Any] = {
    "openai": {"url": "http://a/v1", "models": {"gpt": "g"}} | PRICES,
    "acme": {"url": "http://a/v1", "models": {"large": "l"}, "project": "acme"} | PRICES,
    "unpriced": {"url": "http://a/v1", "models": {"ours": "o"}},
}


@pytest.fixture
def settings(engine: Engine) -> Settings:
    settings = Settings(upstreams=UPSTREAMS, projects={"acme": {"policies": ["acme-agent"]}}, vllm={"max_loras": 8})  # type: ignore[arg-type]
    Store(engine).prepare(settings)
    return settings


def answered(seed: Seed, policy: str, project: str = "default", **values: Any) -> None:
    """One call of a policy, of a million tokens each way."""
    trajectory_id = f"{policy} {values.get('created_at', NOW)}"
    seed.trajectory(trajectory_id, project=project, policy=policy, turns=0)
    tokens = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}
    seed.completion(trajectory_id, 0, project, policy=policy, **tokens | values)


def spent(engine: Engine, settings: Settings, now: datetime = NOW) -> Spending:
    with engine.connect() as connection:
        return read_spending(connection, settings, now)


def test_tokens_of_other_servers_cost_their_price_and_ours_nothing(
    engine: Engine, seed: Seed, settings: Settings
) -> None:
    for policy, project in (("gpt", "default"), ("large", "acme"), ("ours", "default"), ("starter", "default")):
        answered(seed, policy, project)
    answered(seed, "gpt", created_at=NOW - timedelta(hours=1), completion_tokens=None)
    of_all = spent(engine, settings)
    assert of_all.upstreams == {("default", "gpt"): 12.0, ("acme", "large"): 10.0}
    assert (of_all.usd, of_all.of_project("acme"), of_all.of_project("default")) == (22.0, 10.0, 12.0)
    own = settings.of_project("acme")
    assert spent(engine, own) == of_all, "the settings of one project know those of all"


def test_judges_cost_what_was_stored_on_that_day(engine: Engine, seed: Seed, settings: Settings) -> None:
    zero = dict.fromkeys(("calls", "refused", "failed", "tokens"), 0)
    today, before = "2026-01-01", "2025-12-31"
    for project, day, cost_usd in (("default", today, 0.5), ("acme", today, 1.5), ("default", before, 9)):
        seed.insert(schema.judge_days, project=project, policy="p", day=day, judge="j", cost_usd=cost_usd, **zero)
    assert spent(engine, settings).judges == {"default": 0.5, "acme": 1.5}
    assert spent(engine, settings).judges_usd == 2.0


def test_a_day_is_one_of_utc(engine: Engine, seed: Seed, settings: Settings) -> None:
    midnight = datetime(2026, 1, 1, tzinfo=UTC)
    for created_at in (midnight - timedelta(seconds=1), midnight, midnight + timedelta(hours=23, minutes=59)):
        answered(seed, "gpt", created_at=created_at)
    by_day = [spent(engine, settings, midnight + timedelta(days=days)).usd for days in (-1, 0, 1)]
    assert by_day == [10.0, 20.0, 0.0]
    assert (day_of(NOW), next_day(NOW)) == ("2026-01-01", datetime(2026, 1, 2, tzinfo=UTC))


@pytest.mark.parametrize(
    ("own", "price"),
    [
        ({"usd_per_million_prompt_tokens": 1.0}, Prices(2.0, 8.0)),
        ({"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 3.0}, Prices(1.0, 3.0)),
    ],
)
def test_the_teachers_own_price_comes_before_that_of_its_server(own: dict[str, float], price: Prices) -> None:
    learning = {"starter": {"handover": {"teacher": "gpt"} | own}}
    settings = Settings(upstreams={"openai": UPSTREAMS["openai"]}, learning=learning)  # type: ignore[arg-type]
    assert settings.upstream_prices == {("default", "gpt"): price}
