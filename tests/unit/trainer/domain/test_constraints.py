"""What the proxy recorded of a completion's sampling, as the trainer reads it."""

import pytest

from trainer.domain.constraints import Constraints


def test_every_field_of_the_contract_is_read() -> None:
    recorded = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {"7": -101}, "min_tokens": 3, "allowed_token_ids": [1, 2],
        "grammar": "tool_choice",
    }  # fmt: skip
    read = Constraints.of(recorded)
    assert read == Constraints(
        presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((7, -100.0),), min_tokens=3,
        allowed_token_ids=(1, 2), top_k=20, top_p=0.9, min_p=0.1, grammar="tool_choice",
    )  # fmt: skip
    assert (read.truncates, read.penalizes, read.needs_weights, read.unknown) == (True, True, True, ())


@pytest.mark.parametrize(
    ("recorded", "unknown"),
    [
        ({"bad_words": ["x"]}, ("bad_words",)),
        ({"top_p": "much", "top_k": 4}, ("top_p",)),
        ({"logit_bias": 3}, ("logit_bias",)),
    ],
)
def test_what_cannot_be_read_is_named(recorded: dict[str, object], unknown: tuple[str, ...]) -> None:
    assert Constraints.of(recorded).unknown == unknown


def test_penalties_need_no_weights_and_a_top_k_of_minus_one_is_none() -> None:
    read = Constraints.of({"presence_penalty": 0.5, "top_k": -1})
    assert not read.truncates and not read.needs_weights


@pytest.mark.parametrize(
    ("recorded", "offset", "token_id", "decided"),
    [
        ({"allowed_token_ids": [4]}, 0, 4, True),
        ({"allowed_token_ids": [4, 5]}, 0, 4, False),
        ({"allowed_token_ids": [4, 9], "min_tokens": 2}, 1, 4, True),  # 9 ends an answer: it is not allowed yet
        ({"allowed_token_ids": [4, 9], "min_tokens": 2}, 2, 4, False),
        ({"allowed_token_ids": [4, 8], "min_tokens": 2}, 0, 4, True),  # 8 ends this call
        ({"min_tokens": 2}, 0, 4, False),
        ({"min_tokens": 2}, 0, 9, True),  # it cannot have been sampled, so it cannot be weighed
        ({"allowed_token_ids": [4, 5]}, 0, 6, True),
    ],
)  # fmt: skip
def test_lists_of_ids_decide_where_they_leave_one(
    recorded: dict[str, object], offset: int, token_id: int, decided: bool
) -> None:
    assert Constraints.of(recorded, [8]).decided_by_ids([4] * offset + [token_id], {9})[offset] is decided
