"""List the states that policies, versions, groups, trajectories, steps and feedback pass through.

A value is the text in SQL, in the API and in metrics. A test compares the lists with the comments in
`migrations.schema`.
"""

from enum import StrEnum


class PolicyState(StrEnum):
    """What happens to a policy's calls."""

    RECORDING = "recording"
    """Calls are recorded; no step trains on them."""
    TRAINING = "training"
    """Calls are recorded, and steps train on them."""
    PAUSED = "paused"
    """It was training; no step starts until it is resumed."""


class VersionState(StrEnum):
    """Where a version stands between its step and the end of its use."""

    BUILDING = "building"
    """A step is training it."""
    CANDIDATE = "candidate"
    """It is trained; the gate tests it."""
    LIVE = "live"
    """It answers requests that name its policy."""
    RETIRED = "retired"
    """It was live, and another version is now; it can be made live again."""
    REJECTED = "rejected"
    """It failed a test of the gate, or was withdrawn; `reason` says why."""


class GroupState(StrEnum):
    """Where a group stands between its first member and the step that trains on it."""

    OPEN = "open"
    """Members may still join."""
    CLOSED = "closed"
    """It has all its members; rewards are missing."""
    SCORED = "scored"
    """Its rewards are known; it waits for a step."""
    CLAIMED = "claimed"
    """A step has taken it."""
    TRAINED = "trained"
    """A step has trained on it."""
    DISCARDED = "discarded"
    """No step will train on it; `reason` says why."""


UNFINISHED_GROUP_STATES = (GroupState.OPEN, GroupState.CLOSED, GroupState.SCORED, GroupState.CLAIMED)
"""States of a group that neither was trained on nor was discarded."""


class TrajectoryStatus(StrEnum):
    """Where a trajectory stands between its first completion and the step that trains on it."""

    OPEN = "open"
    """It may still be continued."""
    ENDED = "ended"
    """It takes no more completions and has no reward yet."""
    REWARDED = "rewarded"
    """It has the reward that its group is compared by."""
    CLAIMED = "claimed"
    """A step has taken it."""
    TRAINED = "trained"
    """A step has trained on it."""
    EXCLUDED = "excluded"
    """No step will train on it; `why_not_trained` says why."""


class StepState(StrEnum):
    """Where a step stands."""

    CLAIMED = "claimed"
    """It has taken its groups; the learner works."""
    TRAINED = "trained"
    """Its version is written to disk."""
    LOADED = "loaded"
    """vLLM has loaded its version."""
    WAITING_GATE = "waiting_gate"
    """Its version has passed the probe; further tests of the gate run. No worker holds the step."""
    PROMOTED = "promoted"
    """Its version went live."""
    REJECTED = "rejected"
    """The gate refused its version."""
    NOOP = "noop"
    """It had nothing to learn from and made no version."""
    FAILED = "failed"
    """An error ended it before its version was served."""


FEEDBACK_SOURCES = frozenset({"trajectory", "completions", "steps", "group"})
"""`reward_source` of a reward that came from the app itself; it contains what was earned at steps."""


class FeedbackState(StrEnum):
    """What has happened to a piece of feedback."""

    WAITING = "waiting"
    """Its target is not recorded yet, or the judge has not looked."""
    APPLIED = "applied"
    """It counts."""
    USED = "used"
    """A step has trained on it."""
    SUPERSEDED = "superseded"
    """Later feedback on the same target replaces it completely."""
    WITHDRAWN = "withdrawn"
    """The app took it back."""
    UNUSED = "unused"
    """No step will train on it; `reason` says why."""
    FAILED = "failed"
    """It could not be applied; `reason` says why."""


UNKNOWN_TARGET = "no such trajectory in this project"
UNKNOWN_GROUP = "no such group in this project"
TARGET_NEVER_CAME = (UNKNOWN_TARGET, UNKNOWN_GROUP)
"""Reasons of failed feedback whose target was not recorded in time."""
