"""Read and check the bodies of requests of admins, and build the JSON answers of all of FastAPI's routes."""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Response
from msgspec import Meta

from proxy.errors import BadRequest, NotJson
from whetstone.config.trainer import BEST, CORRECTIONS, DEMONSTRATIONS

DEFAULT_LIMIT = 64
MAX_LIMIT = 10_000
BodyT = TypeVar("BodyT", bound=msgspec.Struct)
Version = Annotated[int, Meta(ge=0, description="0 is the base model.")]
Reason = Annotated[str, Meta(max_length=500, description="Why, for who reads the decisions later.")]


class Promote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version that answers from now on."""

    version: Version
    reason: Reason | None = None


class RollBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version to go back to. Without a body: the one before the live one."""

    to: Annotated[int, Meta(ge=0, description="A version that the live one descends from.")] | None = None
    reason: Reason | None = None


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The version to keep loaded, and on the disk, at any age."""

    version: Version
    pinned: Annotated[bool, Meta(description="`false` ends it.")] = True


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy's new state."""

    state: Annotated[
        Literal["recording", "training", "paused"],
        Meta(description="`paused` answers and records as `recording` does, and refuses steps by hand too."),
    ]


class StepAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """The kind of step and its data. Without a body: a step on the groups that are ready."""

    kind: Annotated[
        Literal["grpo", "sft", "hindsight", "distill", "prefer"],
        Meta(
            description="`grpo` learns from rewards, as `trainer.objective` says; `sft` imitates examples; `hindsight` "
            "learns from words that correct answers; `distill` from a teacher that scores the policy's own answers; "
            "`prefer` from pairs of another policy's answers, of which one has a higher reward."
        ),
    ] = "grpo"
    source: Annotated[
        str | None,
        Meta(
            description="Of `sft`, whose answers: `demonstrations` of feedback, the `best` logged ones of this policy, "
            "or another policy's, by its name. Of `hindsight`, whose words: `comments` or `demonstrations` of "
            "feedback, explanations of the `judge`, errors of `tools`, or users' `replies`. Of `distill`, the teacher, "
            "by its name in the settings. Of `prefer`, the policy whose answers they are."
        ),
    ] = None
    min_reward: Annotated[
        float | None, Meta(description="Of `sft`, least reward of an answer; not for demonstrations.")
    ] = None
    limit: (
        Annotated[
            int,
            Meta(
                description=f"Of all but `grpo`, most examples, or pairs; {DEFAULT_LIMIT} without it.",
                ge=1,
                le=MAX_LIMIT,
            ),
        ]
        | None
    ) = None


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the value as a JSON response."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def parse_body(body: bytes, kind: type[BodyT]) -> BodyT:
    """Parse a body; an empty one counts as an empty object.

    Raises:
        NotJson: the body is not JSON.
        BadRequest: a field is unknown, missing or of the wrong type.
    """
    try:
        return msgspec.json.decode(body if body.strip() else b"{}", type=kind)
    except msgspec.ValidationError as error:
        fields = ", ".join(kind.__struct_encode_fields__)
        raise BadRequest(f"{str(error)[:300]}; fields are {fields}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body must be a JSON object: {error}") from error


def read_step(body: bytes, policy: str, policies: Collection[str], teachers: Collection[str] = ()) -> dict[str, Any]:
    """Return what to store as the step requested for `policy`, one of `policies`. `teachers`: their names.

    Raises:
        NotJson: the body is not JSON.
        BadRequest: a field is unknown or of the wrong type, or does not go with the others.
    """
    request = parse_body(body, StepAsked)
    if request.kind == "grpo":
        given = {"from": request.source, "min_reward": request.min_reward, "limit": request.limit}
        if wrong := next((name for name, value in given.items() if value is not None), None):
            raise BadRequest(
                f'{wrong} goes with "kind": "sft"; a grpo step takes the groups that are there', param=wrong
            )
        return {"kind": "grpo"}
    if request.kind == "hindsight":
        _check_words(request)
    elif request.kind == "distill":
        _check_teacher(request, teachers)
    elif request.kind == "prefer":
        _check_other(request, policy, policies)
    else:
        _check_source(request, policy, policies)
    if request.min_reward is not None and not math.isfinite(request.min_reward):
        raise BadRequest("min_reward must be a finite number", param="min_reward")
    limit = DEFAULT_LIMIT if request.limit is None else request.limit
    return {"kind": request.kind, "from": request.source, "min_reward": request.min_reward, "limit": limit}


def _check_teacher(request: StepAsked, teachers: Collection[str]) -> None:
    if request.source not in teachers:
        names = ", ".join(sorted(teachers)) or "there is none: add [teachers.NAME] to the settings"
        raise BadRequest(f"from must be a teacher's name ({names})", param="from")
    if request.min_reward is not None:
        raise BadRequest("min_reward goes with sft; a distill step needs no rewards", param="min_reward")


def _check_other(request: StepAsked, policy: str, policies: Collection[str]) -> None:
    others = sorted(set(policies) - {policy})
    if request.source not in others:
        names = ", ".join(others) or "there is none: import a log"
        raise BadRequest(f"from must be another policy's name ({names})", param="from")
    if request.min_reward is not None:
        raise BadRequest("min_reward goes with sft; a pair is two answers of different reward", param="min_reward")


def _check_words(request: StepAsked) -> None:
    if request.source not in CORRECTIONS:
        raise BadRequest(f"a hindsight step learns from one of {', '.join(CORRECTIONS)}", param="from")
    if request.min_reward is not None:
        raise BadRequest("min_reward goes with sft; a hindsight step needs no rewards", param="min_reward")


def _check_source(request: StepAsked, policy: str, policies: Collection[str]) -> None:
    others = sorted(set(policies) - {policy})
    if request.source == policy:
        raise BadRequest(f'a policy\'s own answers are "from": "{BEST}"', param="from")
    if request.source not in (DEMONSTRATIONS, BEST, *others):
        choices = f"{DEMONSTRATIONS}, {BEST}, or another policy's name ({', '.join(others) or 'there is none'})"
        got = "nothing" if request.source is None else repr(request.source[:100])
        raise BadRequest(f"from must be {choices}, not {got}", param="from")
    if request.source == DEMONSTRATIONS and request.min_reward is not None:
        raise BadRequest("demonstrations have no reward; leave min_reward out", param="min_reward")
