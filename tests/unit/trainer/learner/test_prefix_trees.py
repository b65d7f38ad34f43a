"""Forests say what their rows say: every row can be read off, and what rows share stands once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.learner.prefix_trees import ROOT, WORTH_SHARING, Ids, batches, common_prefix, forest, ids

# Few different tokens and rows grown from one another: long common beginnings, rows that are prefixes, equal rows.
tails = st.lists(st.integers(0, 2), max_size=80)


@st.composite
def families(draw: st.DrawFn) -> list[Ids]:
    rows = [[0, *draw(tails)]]
    for _ in range(draw(st.integers(0, 7))):
        parent = rows[draw(st.integers(0, len(rows) - 1))]
        cut = draw(st.integers(1, len(parent)))
        rows.append(parent[:cut] + draw(tails))
    return [ids(row) for row in rows]


@given(families())
def test_every_row_can_be_read_off_with_its_positions(rows: list[Ids]) -> None:
    wood = forest(rows)
    for place, row in enumerate(rows):
        flat = wood.places(place)
        assert wood.token_ids_T[flat].tolist() == row.tolist()
        assert wood.position_ids_T[flat].tolist() == list(range(len(row)))


@given(families())
def test_pieces_tile_the_sequence_and_parents_come_first(rows: list[Ids]) -> None:
    wood = forest(rows)
    ends = [0, *(piece.end for piece in wood.pieces)]
    assert [piece.start for piece in wood.pieces] == ends[:-1]
    assert ends[-1] == len(wood.token_ids_T) == len(wood.position_ids_T)
    assert all(piece.start < piece.end and ROOT <= piece.parent < place for place, piece in enumerate(wood.pieces))


@given(families(), st.integers(40, 200))
def test_batches_take_every_row_once_and_keep_to_the_budget(rows: list[Ids], budget: int) -> None:
    groups = batches(rows, budget)
    assert sorted(place for group in groups for place in group) == list(range(len(rows)))
    for group in groups:
        assert len(group) == 1 or len(forest([rows[place] for place in group]).token_ids_T) <= budget


def test_what_rows_share_stands_once() -> None:
    prompt = list(range(100))
    wood = forest([ids([*prompt, 200 + row, *range(300, 310)]) for row in range(8)])
    assert len(wood.token_ids_T) == 100 + 8 * 11
    assert [piece.parent for piece in wood.pieces] == [ROOT] + [0] * 8


def test_a_fork_within_a_branch_is_shared_too() -> None:
    prompt, thought = list(range(64)), list(range(100, 164))
    wood = forest([ids([*prompt, *thought, 1]), ids([*prompt, *thought, 2]), ids([*prompt, 3])])
    assert len(wood.token_ids_T) == 64 + 64 + 3


def test_what_is_too_short_to_be_worth_a_piece_is_read_again() -> None:
    short = list(range(WORTH_SHARING - 1))
    assert len(forest([ids([*short, 100]), ids([*short, 101])]).token_ids_T) == 2 * WORTH_SHARING


def test_equal_rows_are_read_once() -> None:
    row = ids(range(50))
    assert len(forest([row, row, row]).token_ids_T) == 50


def test_the_same_rows_make_the_same_batches_in_any_order() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(50, size=rng.integers(20, 60)) for _ in range(12)]
    turned = rows[::-1]
    one = [sorted(rows[place].tobytes() for place in group) for group in batches(rows, 150)]
    other = [sorted(turned[place].tobytes() for place in group) for group in batches(turned, 150)]
    assert one == other


@pytest.mark.parametrize(("one", "other", "common"), [([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([4, 5], [4, 6], 1)])
def test_common_prefix(one: list[int], other: list[int], common: int) -> None:
    assert common_prefix(ids(one), ids(other)) == common
