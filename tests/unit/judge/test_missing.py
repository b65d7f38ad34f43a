"""Before anything starts: what judging needs and does not find."""

from judge.__main__ import missing
from whetstone.config.settings import Settings

RUN = "nowhere_at_all:function"


def found(**values):
    return list(missing(Settings(policy="starter", **values)))


def test_nothing_is_missing_where_nothing_is_judged():
    assert found() == []


def test_a_reward_function_that_is_not_found_is_told_with_the_remedy():
    (told,) = found(learning={"starter": {"rewards": [{"name": "f", "run": RUN}]}})
    assert "learning.starter" in told and RUN in told and "correct `run`" in told


def test_a_rubric_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "there").write_text("short is good")
    (told,) = found(
        learning={"starter": {"ruler": {"rubric": tmp_path / "there", "rubrics": {"mail": tmp_path / "x"}}}}
    )
    assert f"the rubric {tmp_path / 'x'} cannot be read" in told


def test_a_key_that_is_not_set_is_told(monkeypatch):
    monkeypatch.setenv("THERE", "secret")
    judges = {"a": {"model": "openai/m", "api_key_env": "THERE"}, "b": {"model": "openai/m", "api_key_env": "ABSENT"}}
    (told,) = found(judges=judges)
    assert told == "judges.b: the environment variable ABSENT that holds its key is not set"


def test_a_judge_of_unknown_price_is_refused_under_a_spending_cap():
    priced = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 2.0}
    judges = {"own": {"model": "base"}, "set": {"model": "openai/ours", **priced}, "unknown": {"model": "openai/ours"}}
    assert list(missing(Settings(judges=judges))) == []
    (sentence,) = missing(Settings(judges=judges, spending={"usd_per_day": 5}))
    assert sentence == (
        "judges.unknown: spending.usd_per_day is set, and the price of openai/ours is unknown; set "
        "usd_per_million_prompt_tokens and usd_per_million_completion_tokens (0 if it costs nothing)"
    )
