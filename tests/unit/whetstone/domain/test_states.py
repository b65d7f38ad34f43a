"""The lists of states agree with the columns that hold them."""

from enum import StrEnum

import pytest
from sqlalchemy import Table

from migrations import schema
from whetstone.domain.states import (
    FeedbackState,
    GroupState,
    PolicyState,
    StepState,
    TrajectoryStatus,
    VersionState,
)

COLUMNS: dict[type[StrEnum], Table] = {
    PolicyState: schema.policies,
    VersionState: schema.policy_versions,
    GroupState: schema.groups,
    TrajectoryStatus: schema.trajectories,
    StepState: schema.steps,
    FeedbackState: schema.feedback,
}


@pytest.mark.parametrize("states", COLUMNS, ids=lambda states: states.__name__)
def test_the_comment_of_the_column_lists_the_states(states: type[StrEnum]) -> None:
    comment = COLUMNS[states].c.state.comment
    assert comment is not None
    _, _, listed = comment.partition(": ")
    assert set(listed.split(" | ")) == {state.value for state in states}
