"""Read and check the body of `POST /admin/policies/{policy}/step`, by which an admin requests a step."""

import math
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from proxy.api.version_bodies import parse_body
from proxy.errors import BadRequest
from whetstone.config.trainer import BEST, DEMONSTRATIONS, Kind

DEFAULT_LIMIT = 64
MAX_LIMIT = 10_000


class StepAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    """The kind of step and its data. Without a body: a policy-gradient step on the groups that are ready."""

    kind: Annotated[Kind, Meta(description="`sft` imitates examples instead of weighing trajectories.")] = "grpo"
    source: Annotated[
        str | None,
        Meta(
            description="Of `sft`, whose answers: `demonstrations` of feedback, the `best` logged ones of this policy, "
            "or another policy's, by its name."
        ),
    ] = None
    min_reward: Annotated[
        float | None, Meta(description="Of `sft`, least reward of an answer; not for demonstrations.")
    ] = None
    limit: (
        Annotated[int, Meta(description=f"Of `sft`, most examples; {DEFAULT_LIMIT} without it.", ge=1, le=MAX_LIMIT)]
        | None
    ) = None


def read_step(body: bytes, policy: str, policies: Collection[str]) -> dict[str, Any]:
    """Return what to store as the step requested for `policy`, one of `policies`.

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
    _check_source(request, policy, policies)
    if request.min_reward is not None and not math.isfinite(request.min_reward):
        raise BadRequest("min_reward must be a finite number", param="min_reward")
    limit = DEFAULT_LIMIT if request.limit is None else request.limit
    return {"kind": "sft", "from": request.source, "min_reward": request.min_reward, "limit": limit}


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
