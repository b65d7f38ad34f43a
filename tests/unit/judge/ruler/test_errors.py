"""What an error means and how long to wait, as far as no litellm is needed for it."""

from datetime import UTC, datetime

import pytest

from judge.ruler.errors import MAX_AFTER_S, JudgeUnavailable, after_s, translated
from whetstone.config.rewards import JudgeSettings

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()
JUDGE = JudgeSettings(model="openai/m", api_key_env="JUDGE_KEY")


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "99999999"}, MAX_AFTER_S),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "1"}, 1),
        ({"retry-after": "Sun, 01 Mar 2026 12:01:30 GMT"}, 90),
        ({"retry-after": "Sun, 01 Mar 2026 12:01:30 -0000"}, 90),
        ({"retry-after": "Sun, 01 Mar 2026 11:00:00 GMT"}, 0),
        ({"retry-after": "Sun, 01 Mar 2036 11:00:00 GMT"}, MAX_AFTER_S),
        ({"retry-after": "later"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "5", "x-ratelimit-reset-tokens": "20s"}, 5),
        ({"retry-after": "later", "x-ratelimit-reset-tokens": "20s"}, 20),
        ({"x-ratelimit-reset-requests": "120ms", "x-ratelimit-reset-tokens": "6m0s"}, 360),
        ({"x-ratelimit-reset-requests": "1.5s"}, 1.5),
        ({"x-ratelimit-reset-requests": "1h2m"}, MAX_AFTER_S),
        ({"x-ratelimit-reset": "30"}, 30),
        ({"x-ratelimit-reset": str(NOW + 40)}, 40),
        ({"x-ratelimit-reset": str((NOW + 40) * 1000)}, 40),
        ({"anthropic-ratelimit-input-tokens-reset": "2026-03-01T12:00:20Z"}, 20),
        ({"x-ratelimit-reset": "nan"}, None),
        ({"x-ratelimit-reset": "1.2.3s"}, None),
        ({"x-ratelimit-reset": ""}, None),
        ({"x-ratelimit-remaining-requests": "5"}, None),
    ],
    ids=str,
)
def test_how_long_to_wait_is_what_the_provider_says_within_an_hour(headers, wait_s):
    assert after_s(headers, NOW) == (None if wait_s is None else pytest.approx(wait_s))


def test_an_error_of_any_other_class_says_its_name_and_is_for_later():
    for error in (ValueError("no"), KeyError("choices"), OSError(), type("New", (Exception,), {})("x")):
        unanswered = translated(error, "strong", JUDGE)
        assert isinstance(unanswered, JudgeUnavailable)
        assert type(error).__name__ in str(unanswered)
        assert unanswered.after_s is None


def test_a_message_is_short_storable_and_free_of_the_key(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-of-mine")
    said = str(translated(ValueError("a\0b \ud800 s3cret-of-mine\n\n" + "x" * 180 + "s3cret-of-mine"), "strong", JUDGE))
    assert "s3cret" not in said
    assert said.startswith("ValueError: a\N{REPLACEMENT CHARACTER}b ? [key] xxx")
    assert len(said) <= 300
    said.encode()


def test_a_missing_package_of_a_provider_is_no_matter_of_time():
    said = str(translated(ModuleNotFoundError("No module named 'boto3'"), "strong", JUDGE))
    assert said == "ModuleNotFoundError: No module named 'boto3'; check judges.strong.model and judges.strong.url"
