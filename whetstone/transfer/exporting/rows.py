"""Build the rows of an export: conversations of a trajectory, preference pairs of a group, ratings of people."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any

from whetstone.database.types import as_json
from whetstone.domain.why_not_trained import Reason, WhyNotTrained

CHAT = "chat.completions"
WHOLE = frozenset({"stop", "tool_calls", "function_call"})
"""Finish reasons of an answer that ended by itself."""
Message = dict[str, Any]


class LeftOut(Reason):
    """Why something that the filter matches is not in the file."""

    # The first four are included on request: `--include`.
    EVAL = "eval", "split eval"
    NO_TRAIN = "no_train", "the app asked not to train on it"
    REDACTED = "redacted", "something was taken out of its text"
    CUT_OFF = "cut_off", "its answer did not end by itself"
    SUPERSEDED = "superseded", "a retry took its place"
    EMPTY = "empty", "no answer in it is complete"
    NOT_A_CHAT = "not_a_chat", "its calls are not chat completions"
    NOT_TABULAR = "not_tabular", "a message that Parquet's columns cannot hold: media; JSONL can"
    ALONE = "alone", "a group with fewer than two members that can be compared"
    GAP = "gap", "a group whose rewards lie too close together"
    PROMPTS_DIFFER = "prompts_differ", "a pair whose prompts or tools differ"


INCLUDABLE = (LeftOut.EVAL, LeftOut.NO_TRAIN, LeftOut.REDACTED, LeftOut.CUT_OFF)
"""Reasons that `--include` can override."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """The fields of a trajectory that exports use."""

    trajectory_id: str
    group_id: str | None
    policy: str
    task: str | None
    split: str
    no_train: bool
    state: str
    reward: float | None
    reward_source: str | None
    first_version: int | None
    last_version: int | None
    why_not_trained: str | None
    trained_in_step: int | None
    metadata: Mapping[str, Any] | None
    end_user: str | None
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Rating:
    """A person's feedback on an attempt or on one answer, with the fields of the attempt that exports use."""

    feedback_id: str
    metadata: Mapping[str, Any]
    target: str
    """What was rated: trajectory or completion."""
    trajectory_id: str
    completion_id: str | None
    group_id: str | None
    policy: str
    version: int | None
    task: str | None
    split: str
    reward: float | None
    source: str
    comment: str | None
    demonstration: Any
    key_id: str | None
    state: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Completion:
    """The fields of a completion that exports use, named as in the table."""

    id: str
    turn: int
    endpoint: str
    status: str
    policy_version: int
    follows: str | None
    new_messages: Sequence[Any] | None
    tools: Sequence[Any] | None
    response: Mapping[str, Any] | None
    response_text: str | None
    why_not_trained: str | None
    finish_reason: str | None
    prompt_token_ids: Sequence[int] | None = None
    token_ids: Sequence[int] | None = None
    inference_logprobs: Sequence[float] | None = None

    @property
    def answer(self) -> Message | None:
        """The answer's message without null fields; None if there is no answer."""
        if not self.response and self.response_text is None:
            return None
        message = {"role": "assistant", "content": self.response_text} | dict(self.response or {})
        return {name: value for name, value in message.items() if name == "content" or value not in (None, [])}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A line of completions, each of which extends the previous one, including its answer."""

    messages: list[Message]
    answers: list[int]
    """Positions of the answers among all messages."""
    tools: Sequence[Any] | None
    line: Sequence[Completion]

    @property
    def last(self) -> Completion:
        """The last completion of the line."""
        return self.line[-1]

    def flat(self) -> dict[str, Any]:
        """Return all its token ids in one row: which were sampled, and their logprobs (null where nothing was sampled).

        All three are null if an id is unknown.
        """
        ids: list[int] = []
        sampled: list[bool] = []
        logprobs: list[float | None] = []
        for one in self.line:
            if one.prompt_token_ids is None or one.token_ids is None or one.inference_logprobs is None:
                return {"token_ids": None, "sampled": None, "inference_logprobs": None}
            ids += [*one.prompt_token_ids, *one.token_ids]
            sampled += [False] * len(one.prompt_token_ids) + [True] * len(one.token_ids)
            logprobs += [*([None] * len(one.prompt_token_ids)), *one.inference_logprobs]
        return {"token_ids": ids, "sampled": sampled, "inference_logprobs": logprobs}


@dataclass(slots=True)
class Tally:
    """The counts of an export."""

    rows: int = 0
    left_out: Counter[LeftOut] = field(default_factory=Counter)


def build_conversations(completions: Iterable[Completion]) -> list[Conversation]:
    """Return a trajectory's conversations, by their last turns: one, unless its app continued from several places.

    An incomplete or superseded completion never ends a conversation.
    """
    by_id = {one.id: one for one in completions}
    usable = [
        one
        for one in by_id.values()
        if one.status == "complete" and one.answer is not None and one.why_not_trained != WhyNotTrained.SUPERSEDED
    ]
    extended = {one.follows for one in usable}
    by_turn = sorted(usable, key=lambda one: one.turn)
    return [build_conversation(by_id, one.id) for one in by_turn if one.id not in extended]


def build_conversation(by_id: Mapping[str, Completion], completion_id: str) -> Conversation:
    """Return the conversation that ends with this completion."""
    line: list[Completion] = []
    at = by_id.get(completion_id)
    while at is not None:
        line.insert(0, at)
        at = by_id.get(at.follows or "")
    messages: list[Message] = []
    answers: list[int] = []
    for one in line:
        messages += one.new_messages or ()
        if one.answer is not None:
            answers.append(len(messages))
            messages.append(one.answer)
    tools = next((one.tools for one in reversed(line) if one.tools is not None), None)
    return Conversation(messages, answers, tools, line)


def why_left_out(attempt: Attempt, conversations: Sequence[Conversation], include: Container[str]) -> LeftOut | None:
    """Return why a trajectory is left out as a whole; None if it is not."""
    completions = (one for conversation in conversations for one in conversation.line)
    reasons = {
        LeftOut.EVAL: attempt.split == "eval",
        LeftOut.NO_TRAIN: attempt.no_train,
        LeftOut.SUPERSEDED: attempt.why_not_trained == WhyNotTrained.SUPERSEDED,
        LeftOut.EMPTY: not conversations,
        LeftOut.REDACTED: any(one.why_not_trained == WhyNotTrained.REDACTED for one in completions),
    }
    return next((reason for reason, applies in reasons.items() if applies and reason not in include), None)


def trajectory_rows(attempt: Attempt, conversations: Sequence[Conversation], *, ids: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each conversation of a trajectory; `ids` adds what was sampled, token by token."""
    attempt_columns = {name: getattr(attempt, name) for name in Attempt.__slots__}
    for place, one in enumerate(conversations):
        yield attempt_columns | {
            "conversation": place,
            "endpoint": one.last.endpoint,
            "versions": [completion.policy_version for completion in one.line],
            "completion_ids": [completion.id for completion in one.line],
            "messages": one.messages,
            "tools": one.tools,
            **(one.flat() if ids else {}),
        }


def sft_row(attempt: Attempt, messages: list[Message], tools: Sequence[Any] | None, source: str) -> dict[str, Any]:
    """Return the row of a conversation to imitate."""
    return {
        "messages": messages,
        "tools": tools,
        "source": source,
        "reward": attempt.reward,
        "task": attempt.task,
        "group_id": attempt.group_id,
        "trajectory_id": attempt.trajectory_id,
        "version": attempt.last_version,
    }


def why_no_example(conversation: Conversation, include: Container[str]) -> LeftOut | None:
    """Return why a conversation cannot be imitated as text; None if it can."""
    if any(one.endpoint != CHAT for one in conversation.line):
        return LeftOut.NOT_A_CHAT
    return None if conversation.last.finish_reason in WHOLE or LeftOut.CUT_OFF in include else LeftOut.CUT_OFF


def pair(better: tuple[Attempt, Conversation], worse: tuple[Attempt, Conversation]) -> dict[str, Any] | LeftOut:
    """Return a preference pair: the shared conversation up to where the answers differ, and both continuations."""
    (won, chosen), (lost, rejected) = better, worse
    both = zip(chosen.messages, rejected.messages, strict=False)
    shared = sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], both))
    parts_at_an_answer = shared in chosen.answers and shared in rejected.answers
    if shared == 0 or not parts_at_an_answer or (chosen.tools or None) != (rejected.tools or None):
        return LeftOut.PROMPTS_DIFFER
    return {
        "prompt": chosen.messages[:shared],
        "chosen": chosen.messages[shared:],
        "rejected": rejected.messages[shared:],
        "tools": chosen.tools,
        "chosen_reward": won.reward,
        "rejected_reward": lost.reward,
        "task": won.task,
        "group_id": won.group_id,
        "chosen_trajectory_id": won.trajectory_id,
        "rejected_trajectory_id": lost.trajectory_id,
        "chosen_version": won.last_version,
        "rejected_version": lost.last_version,
    }


def rating_row(rating: Rating) -> dict[str, Any]:
    """Return the row of a rating: the rater and the score (1 to 5) come out of its metadata; a right answer with more
    than text becomes JSON text."""
    others = {name: value for name, value in rating.metadata.items() if name not in ("rater", "score")}
    score, demonstration = rating.metadata.get("score"), rating.demonstration
    content = demonstration.get("content") if isinstance(demonstration, Mapping) else None
    is_text = demonstration is None or (isinstance(content, str) and not demonstration.get("tool_calls"))
    return {
        "rater": str(rating.metadata["rater"]),
        "target": rating.target,
        "trajectory_id": rating.trajectory_id,
        "completion_id": rating.completion_id,
        "source": rating.source,
        "reward": rating.reward,
        "score": score if isinstance(score, int) else None,
        "comment": rating.comment,
        "demonstration": content if is_text else as_json(demonstration),
        "policy": rating.policy,
        "version": rating.version,
        "group_id": rating.group_id,
        "task": rating.task,
        "split": rating.split,
        "state": rating.state,
        "key_id": rating.key_id,
        "feedback_id": rating.feedback_id,
        "created_at": rating.created_at,
        "metadata": others or None,
    }
