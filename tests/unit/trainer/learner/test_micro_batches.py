from hypothesis import given
from hypothesis import strategies as st

from trainer.learner.micro_batches import by_length


def test_rows_of_like_length_share_a_micro_batch() -> None:
    assert by_length([10, 50, 11, 49], budget_tokens=100) == [[1, 3], [2, 0]]


def test_a_row_above_the_budget_is_alone() -> None:
    assert by_length([500, 10, 20], budget_tokens=100) == [[0], [2, 1]]


@given(st.lists(st.integers(1, 200), max_size=50), st.integers(64, 512))
def test_every_row_is_in_one_micro_batch_and_none_is_above_the_budget(lengths: list[int], budget_tokens: int) -> None:
    batches = by_length(lengths, budget_tokens)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= budget_tokens
