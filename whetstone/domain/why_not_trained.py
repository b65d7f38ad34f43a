"""List the reasons why something was not trained on, which proxy, judge and trainer write into `why_not_trained`.

The list is closed. docs/why_not_trained.md has the same list as a table; a test compares the two.
"""

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """A reason whose members carry their meanings."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make a member that carries its meaning."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class WhyNotTrained(Reason):
    """A reason; its value is the text in SQL and in the API."""

    # It may still be trained on: something is pending.
    NO_REWARD = "no_reward", "No feedback and no reward function has given it a reward."
    GROUP_OPEN = "group_open", "It has a reward; its group still waits for members or for their rewards."
    WAITING_STEP = "waiting_step", "Its group is scored and waits for a step."
    POLICY_NOT_TRAINING = "policy_not_training", "Its group is scored; the policy only records, or is paused."
    STEP_FAILED = "step_failed", "The step that took it failed before its weights changed anything."

    # Decided by the app, or by its place in a trajectory or group.
    SPLIT_EVAL = "split_eval", "The app put it into the split `eval`."
    NO_TRAIN = "no_train", "The app does not allow training on it."
    NO_GROUP = "no_group", "It belongs to no group yet."
    TOO_FEW = (
        "too_few",
        "Its group had too few rewarded members at its deadline, and its policy keeps no baseline, or had none yet.",
    )
    LATE = "late", "It, or its reward, came after its group was claimed or discarded, and its policy keeps no baseline."
    OTHER_POLICY = "other_policy", "It was answered by another policy than that of its trajectory or step."
    SUPERSEDED = "superseded", "A retry of the same request took its place."
    TRAJECTORY_OVER = "trajectory_over", "The completion came after its trajectory was rewarded."
    DEMONSTRATION = "demonstration", "Another server than this policy's own vLLM answered; no step weighs its tokens."

    # What was captured cannot be trained on exactly.
    EMPTY = "empty", "It has no completion."
    GREEDY = "greedy", "Temperature 0: nothing was sampled, so there is nothing to weigh."
    FIXED_SEED = "fixed_seed", "Sampled with the seed of an earlier member of its group, it could not differ from it."
    SAMPLING_BENT = (
        "sampling_bent",
        "A field of the request bends the distribution that tokens were drawn from in a way that cannot be computed "
        "again, or is unknown; followed by its name: `sampling_bent: bad_words` (docs/parameters.md).",
    )
    MEDIA = "media", "Its request contains images, audio or files, which no step reads."
    ABORTED = "aborted", "The client went away before the answer was complete."
    ERROR = "error", "The call failed."
    NO_TOKEN_IDS = "no_token_ids", "vLLM did not return the token ids."
    NO_LOGPROBS = "no_logprobs", "vLLM did not return a finite logprob for every sampled token."
    REDACTED = (
        "redacted",
        "Something was taken out of its text before it was written, and its token ids with it (docs/privacy.md).",
    )
    IMPORTED = (
        "imported",
        "It came from a log, as text (`whetstone import`): which tokens were sampled is unknown. Supervised steps "
        "and exports can use it.",
    )
    FAULT = "fault", "Judging it, or its group, breaks with an error of Whetstone's own: the judge's log has it."

    # The step that it was meant for could not use it.
    GROUP_UNIFORM = (
        "group_uniform",
        "All that it is compared with has the same reward, up to a gap of 1e-4 of it: no advantage.",
    )
    REWARD_TOO_LARGE = (
        "reward_too_large",
        "Rewards lie more than 1e6 apart in its group, or its own from its baseline: it would drown all others.",
    )
    JUDGE_NOISE = "judge_noise", "The judge's scores of its group differ by less than the judge differs from itself."
    ALREADY_TRAINED = (
        "already_trained",
        "A step has trained on it; followed by the step's number where feedback says so: `already_trained: 7`.",
    )
    CONSTRAINED = (
        "constrained",
        "A grammar or a truncation decided all of its tokens, or what it allowed cannot be measured any more.",
    )
    TOO_LONG = (
        "too_long",
        "Its row is longer than `trainer.max_row_tokens`, or does not fit into the memory of the trainer's device.",
    )
    CUT_OFF = (
        "cut_off",
        "A length limit ended its last answer, and `trainer.cut_off` leaves such attempts out; by default where a "
        "judge gave the reward.",
    )
    STALE = "stale", "More updates than `trainer.max_staleness` lie between the version that answered and the step."
    OFF_LINEAGE = "off_lineage", "The version that answered is no ancestor of the version that the step starts from."


OF_COMPLETIONS = frozenset(
    {
        WhyNotTrained.DEMONSTRATION,
        WhyNotTrained.GREEDY,
        WhyNotTrained.SAMPLING_BENT,
        WhyNotTrained.MEDIA,
        WhyNotTrained.ABORTED,
        WhyNotTrained.ERROR,
        WhyNotTrained.NO_TOKEN_IDS,
        WhyNotTrained.NO_LOGPROBS,
        WhyNotTrained.REDACTED,
    }
)
"""Reasons that a completion has by itself, for good. If all completions of a trajectory have one, so does the
trajectory: at once, whatever else it waits for."""


def name_of(reason: str) -> str:
    """Return the reason without what follows a colon: `sampling_bent` of `sampling_bent: bad_words`."""
    return reason.partition(":")[0]
