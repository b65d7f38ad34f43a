"""Read and check the body of `POST /v1/feedback`: what an app reports about a trajectory's worth. Pure."""

import contextlib
import difflib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from proxy.domain.json_values import MAX_DEPTH, depth
from proxy.errors import BadRequest, NotForTokens, NotJson
from whetstone.domain.ids import ID
from whetstone.domain.reward_bounds import MAX_PARTS, MAX_REWARD, PART

MAX_BATCH = 1000
MAX_TEXT = 20_000
"""Most characters of a comment or a rubric."""
MAX_JSON = 200_000
"""Most bytes of a demonstration, and of metadata, as JSON."""
MAX_REWARDS = 10_000
"""Most trajectories of a group in one feedback."""
KINDS = ("ruler",)

TOKEN_HEADER = b"x-feedback-token"
"""Of an answer, and of the request that uses the token."""
MAX_RATING_COMMENT = 2000
"""Most characters of a comment that comes with a feedback token."""

_TARGETS = ("trajectory_id", "completion_id", "group_id")
_VALUES = ("reward", "rewards", "thumbs", "parts", "judge")
_OF_GROUPS = ("rewards", "judge")
_AT = re.compile(r" - at `\$\.?(.+)`$")
"""Finds where a value is wrong in msgspec's message."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Finds where camel case has what snake case writes as an underscore."""
_IDS = ("trajectory_id", "completion_id")
_SYNONYMS: dict[tuple[str, ...], str] = {
    ("reward",): "score value rating grade points stars feedback_score",
    ("reward", "thumbs"): "feedback label correct is_correct success passed",
    ("thumbs",): "thumb thumbs_up thumbs_down thumb_up thumb_down like liked dislike vote upvote sentiment helpful",
    ("parts",): "key name scores metric metrics criterion feedback_key",
    ("comment",): "text reason rationale explanation comments note notes message description feedback_text",
    ("demonstration",): "correction expected expected_output reference ground_truth ideal target right_answer edit",
    _IDS: "id target_id run_id trace",
    ("trajectory_id",): "trace_id session_id thread_id conversation_id episode_id rollout_id root_run_id",
    ("completion_id",): (
        "observation_id span_id generation_id call_id response_id message_id request_id step_id chat_id upstream_id "
        "tool_call_id tool_use_id item_id"
    ),
    ("group_id",): "group group_name prompt_id task_id dataset_item_id",
    ("choice",): "index choice_index",
    ("metadata",): "tags extra attributes properties source source_info user_id config_id",
    ("judge",): "rubric criteria evaluator model judge_model",
    ("idempotency_key",): "score_id feedback_id feedback_source_id dedup_key client_request_id",
    ("final",): "done end ended is_final terminal last",
}
"""What Langfuse, LangSmith, Opik, MLflow, W&B Weave and others call our fields; comparing spelling cannot find
these."""
_MEANT = {word: meant for meant, words in _SYNONYMS.items() for word in words.split()}


class Judge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which judge ranks a group, and by which rubric."""

    kind: str
    model: Annotated[str | None, Meta(description="A judge of the settings, by its name there.")] = None
    rubric: Annotated[str | None, Meta(description="What makes an attempt better than another.")] = None


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One feedback as an app posts it: one target, one value."""

    trajectory_id: Annotated[str | None, Meta(description="The value of `X-Trajectory-Id`.")] = None
    completion_id: Annotated[
        str | None,
        Meta(description="`X-Completion-Id`, the answer's own id, or the id of a tool call or a Responses item in it."),
    ] = None
    group_id: Annotated[str | None, Meta(description="Takes `rewards` or `judge`.")] = None
    choice: Annotated[int, Meta(description="Which choice of the answer, from 0.")] = 0
    reward: Annotated[float | None, Meta(description="What it was worth.")] = None
    rewards: Annotated[dict[str, float] | None, Meta(description="`{trajectory_id: number}`, of a group.")] = None
    thumbs: Annotated[Literal["up", "down"] | None, Meta(description="`up` is 1.0, `down` 0.0.")] = None
    parts: Annotated[dict[str, float] | None, Meta(description="Named numbers; the policy's settings weigh them.")] = (
        None
    )
    judge: Annotated[Judge | None, Meta(description="Have the group ranked.")] = None
    demonstration: Annotated[
        str | dict[str, Any] | None, Meta(description="The answer that would have been right: a text or a message.")
    ] = None
    credit: Annotated[
        Literal["step"] | None,
        Meta(description="`step`: a completion's reward was earned there, and counts for it and what came before."),
    ] = None
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    idempotency_key: Annotated[str | None, Meta(description="Posted again under it, nothing is added.")] = None
    final: Annotated[
        bool | None, Meta(description="It ends the trajectory. Left out: it does, unless it speaks of a completion.")
    ] = None

    @property
    def target(self) -> str:
        """The name of the field that identifies the target."""
        return next(name for name in _TARGETS if getattr(self, name) is not None)

    @property
    def value(self) -> str | None:
        """The name of the field that holds the value; None for a demonstration or a comment alone."""
        return next((name for name in _VALUES if getattr(self, name) is not None), None)


def read_feedback(body: bytes, judges: Collection[str] = ()) -> tuple[list[Feedback], bool]:
    """Parse one feedback or a JSON array of them. Also return whether it was an array. `judges`: names that may be
    used.

    Raises:
        NotJson: the body is not JSON, or contains NaN or Infinity.
        BadRequest: a field is unknown, has the wrong type, or contradicts another. Nothing of the batch is accepted
            then.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(_why_not_json(body, error)) from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth(raw) > MAX_DEPTH:
        raise NotJson(f"the body is nested deeper than {MAX_DEPTH} levels")
    items = raw if isinstance(raw, list) else [raw]
    if not 1 <= len(items) <= MAX_BATCH:
        raise BadRequest(f"a batch holds 1 to {MAX_BATCH} feedbacks, not {len(items)}")
    if items is not raw:
        return [_read_one(raw, judges)], False
    return [_read_item(place, item, judges) for place, item in enumerate(items)], True


def read_rating(body: bytes, completion_id: str, choice: int) -> Feedback:
    """Parse what a web page posts with a feedback token for this completion: `thumbs`, and `comment` if it has one.

    Raises:
        NotJson: the body is not JSON.
        NotForTokens: it has another field, or names another completion.
        BadRequest: `thumbs` is missing or neither `up` nor `down`, or the comment is too long.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(_why_not_json(body, error)) from error
    if not isinstance(raw, dict):
        raise BadRequest('with a feedback token the body is one JSON object: {"thumbs": "up"}')
    target = {"completion_id": completion_id, "choice": choice}
    for field, value in raw.items():
        if field in target:
            if value != target[field]:
                raise NotForTokens("this feedback token is for another completion", param=field)
        elif field not in ("thumbs", "comment"):
            raise NotForTokens(
                f"a feedback token permits thumbs and comment; {field[:100]!r} needs an API key, on the app's server",
                param=field[:100],
            )
    rating = _read_one(target | raw, ())
    if rating.thumbs is None:
        raise BadRequest("thumbs must be up or down", param="thumbs")
    if len(rating.comment or "") > MAX_RATING_COMMENT:
        raise BadRequest(f"comment is over {MAX_RATING_COMMENT} characters", param="comment")
    return rating


def _read_item(place: int, item: Any, judges: Collection[str]) -> Feedback:
    try:
        return _read_one(item, judges)
    except BadRequest as error:
        raise BadRequest(f"item {place} of the batch: {error.message}", param=error.param) from error


def _read_one(item: Any, judges: Collection[str]) -> Feedback:
    if isinstance(item, dict):
        _refuse_unknown(item)
    try:
        feedback = msgspec.convert(item, Feedback)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        raise BadRequest(f"feedback: {str(error)[:300]}", param=at[1][:100] if at else None) from error
    _check_target(feedback)
    _check_value(feedback)
    if feedback.judge is not None:
        _check_judge(feedback.judge, judges)
    for name, number in _numbers(feedback):
        if not math.isfinite(number):
            raise BadRequest(f"{name} must be a finite number, not {number}", param=name)
        if abs(number) > MAX_REWARD:
            raise BadRequest(f"{name} must lie within ±{MAX_REWARD:g}, not at {number:g}", param=name)
    _check_sizes(feedback)
    check_id("idempotency_key", feedback.idempotency_key)
    return feedback


def _refuse_unknown(item: Mapping[str, Any]) -> None:
    for field in item:
        if field not in Feedback.__struct_fields__:
            # Fields with a synonym, else the nearest spelling, else none.
            plain = _HUMP.sub("_", field[:100]).replace("-", "_").lower()
            nearest = _MEANT.get(plain) or difflib.get_close_matches(plain, Feedback.__struct_fields__, n=1)
            meant = " or ".join(map(repr, nearest))
            hint = f"did you mean {meant}?" if meant else f"it takes {', '.join(Feedback.__struct_fields__)}"
            raise BadRequest(f"feedback has no field {field[:100]!r}; {hint}", param=field[:100])


def _check_target(feedback: Feedback) -> None:
    given = [name for name in _TARGETS if getattr(feedback, name) is not None]
    if len(given) != 1:
        _not_one(_TARGETS, given)
    check_id(given[0], getattr(feedback, given[0]))
    if not 0 <= feedback.choice < 2**31:
        raise BadRequest("choice counts from 0", param="choice")


def _check_value(feedback: Feedback) -> None:
    given = [name for name in _VALUES if getattr(feedback, name) is not None]
    in_words = feedback.demonstration is not None or bool(feedback.comment and feedback.group_id is None)
    if len(given) > 1 or (not given and not in_words):
        _not_one((*_VALUES, "demonstration", "comment"), given)
    stated = given if feedback.demonstration is None else [*given, "demonstration"]
    wrong = [name for name in stated if (name in _OF_GROUPS) != (feedback.group_id is not None)]
    if wrong:
        allowed = "`rewards` ({trajectory_id: number}) or `judge`"
        raise BadRequest(f"a group takes {allowed}, nothing else does; {wrong[0]} is not for it here", param=wrong[0])
    if feedback.credit is not None and (feedback.completion_id is None or not given):
        raise BadRequest("credit is for the reward, thumbs or parts of a completion_id", param="credit")
    message = feedback.demonstration
    if not isinstance(message, dict):
        return
    if message.get("role") != "assistant":
        raise BadRequest("demonstration is a text, or a message with the role `assistant`", param="demonstration.role")
    content, calls = message.get("content"), message.get("tool_calls")
    if not (content or calls) or not isinstance(content, str | list | None) or not isinstance(calls, list | None):
        problem = "demonstration needs `content` (a string or a list of parts), or a list of `tool_calls`"
        raise BadRequest(problem, param="demonstration")


def _check_judge(judge: Judge, names: Collection[str]) -> None:
    if judge.kind not in KINDS:
        raise BadRequest(f"there is no judge {judge.kind[:100]!r}; there are: {', '.join(KINDS)}", param="judge.kind")
    if judge.model is not None and judge.model not in names:
        known = ", ".join(sorted(names)) or "none; [judges.<name>] in the settings adds one"
        raise BadRequest(f"no judge is named {judge.model[:100]!r}; there are: {known}", param="judge.model")


def _numbers(feedback: Feedback) -> Iterator[tuple[str, float]]:
    """Yield every number in the feedback with its field's name."""
    if feedback.reward is not None:
        yield "reward", feedback.reward
    for name, most, pattern in (("rewards", MAX_REWARDS, ID), ("parts", MAX_PARTS, PART)):
        numbers: dict[str, float] | None = getattr(feedback, name)
        if numbers is None:
            continue
        if not 1 <= len(numbers) <= most:
            raise BadRequest(f"{name} holds 1 to {most} numbers, not {len(numbers)}", param=name)
        for key, number in numbers.items():
            if not pattern.fullmatch(key):
                raise BadRequest(f"{name}: {key[:200]!r} is no name for one; it must be {pattern.pattern}", param=name)
            yield f"{name}.{key}", number


def _check_sizes(feedback: Feedback) -> None:
    judge = feedback.judge or Judge("")
    for name, text in (("comment", feedback.comment), ("judge.model", judge.model), ("judge.rubric", judge.rubric)):
        if text is not None and len(text) > MAX_TEXT:
            raise BadRequest(f"{name} is over {MAX_TEXT} characters", param=name)
    for name in ("demonstration", "metadata"):
        if len(msgspec.json.encode(getattr(feedback, name))) > MAX_JSON:
            raise BadRequest(f"{name} is over {MAX_JSON} bytes", param=name)


def check_id(name: str, value: str | None) -> None:
    """Refuse an invalid id.

    Raises:
        BadRequest: it is not 1 to 128 of `A-Za-z0-9._:@-`.
    """
    if value is not None and not ID.fullmatch(value):
        raise BadRequest(f"{name} must be 1 to 128 of A-Z a-z 0-9 . _ : @ -", param=name)


def _not_one(names: tuple[str, ...], given: list[str]) -> NoReturn:
    problem = f"feedback needs exactly one of {', '.join(names)}; got {', '.join(given) or 'none'}"
    raise BadRequest(problem, param=given[-1] if given else None)


def _why_not_json(body: bytes, error: Exception) -> str:
    constants: list[str] = []
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(body, parse_constant=constants.append)
    if constants:
        return f"{constants[0]} is not a number JSON has; a reward must be finite"
    return f"the body must be JSON: {error}"
