"""The SQL of the current `why_not_trained`: one expression for every reader of the table `trajectories`.

A stored reason is final, except `waiting_step`: whether the policy takes steps can change after it was written. The
admin views use the same rule (migrations/initial_views.py).
"""

from sqlalchemy import ColumnElement, case, select

from migrations import schema
from whetstone.domain.states import PolicyState
from whetstone.domain.why_not_trained import WhyNotTrained

_t, _p = schema.trajectories.c, schema.policies.c
_takes_no_step = (
    select(_p.id)
    .where(_p.project == _t.project, _p.id == _t.policy, _p.state != PolicyState.TRAINING)
    .correlate(schema.trajectories)
    .exists()
)
_waits_for_policy = (_t.why_not_trained == WhyNotTrained.WAITING_STEP.value) & _takes_no_step
_reason: ColumnElement[str | None] = case(
    (_waits_for_policy, WhyNotTrained.POLICY_NOT_TRAINING.value), else_=_t.why_not_trained
)

WHY_NOT_TRAINED = _reason.label("why_not_trained")
"""`waiting_step` of a policy that only records or is paused becomes `policy_not_training`; any other reason is as
stored."""

TRAJECTORY = select(*(WHY_NOT_TRAINED if column is _t.why_not_trained else column for column in _t))
"""Every column of a trajectory."""


def is_for(reason: str) -> ColumnElement[bool]:
    """Return the condition that a trajectory is not trained on for this reason, whatever name follows it."""
    # Some reasons have a name after them: `sampling_bent: top_p`.
    return (_reason == reason) | _reason.startswith(f"{reason}:", autoescape=True)
