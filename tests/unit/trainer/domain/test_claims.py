"""A step as its worker holds it."""

import pytest

from trainer.domain.claims import why_silent


@pytest.mark.parametrize(
    ("completions", "why"),
    [
        ([("p", "aborted"), ("p", "greedy"), ("p", "greedy")], "greedy"),
        ([("p", "aborted"), ("p", "greedy")], "aborted"),
        ([("q", None), ("q", "greedy"), ("p", "error")], "error"),
        ([("q", "demonstration")], "other_policy"),
        ([("p", None)], "no_token_ids"),
        ([], "empty"),
    ],
    ids=["the most frequent", "of equals the first", "of this policy", "no other", "rows without ids", "none"],
)
def test_a_silent_trajectory_says_why_its_completions_are(completions: list[tuple[str, str | None]], why: str) -> None:
    assert why_silent("p", completions) == why
