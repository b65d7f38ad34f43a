"""The pages that compare two versions, or a version and another server: one prompt, several answers of each side.

The calls are recorded as evaluation, like those of `whetstone replay`: no step trains on them. Each answer is a
trajectory of its own, whose id is that of the comparison, the side and a number, so that the page finds it.
"""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from proxy.background.comparisons import TIMEOUT_S, EvaluationCall
from proxy.dashboard import pagination, rendering
from proxy.dashboard.interfaces import ActionResult, FormRequest, PageRequest
from proxy.dashboard.pages import ratings
from proxy.dashboard.queries import comparisons as store_comparisons
from proxy.dashboard.queries import ratings as store_ratings
from proxy.dashboard.views.message_view import messages_of
from proxy.dashboard.views.turn_view import answer_of
from proxy.domain.policies import Policies
from proxy.errors import BadRequest, NotFound, ProxyError
from whetstone.domain.api_keys import Principal
from whetstone.domain.ids import ID, new_id
from whetstone.transfer.repeat import body_of, evaluation_headers, why_not_sent

PATH = "/ui/compare"
SIDES = ("a", "b")
MOST_SAMPLES = 8
"""Most answers of each side."""
DEFAULT_SAMPLES = 2
MOST_TOKENS = 32_768
DEFAULT_TOKENS = 512
MOST_PROMPT = 100_000
"""Most characters of a typed prompt."""
MOST_CHARACTERS = 4_000
COMPARISON = re.compile(r"compare-([0-9a-f]{12})[0-9a-f]{20}")
WAITS = timedelta(seconds=2 * TIMEOUT_S)
"""How long after its start a comparison may still get answers."""
PREFERENCES = {"a": (1.0, 0.0), "same": (0.5, 0.5), "b": (0.0, 1.0)}
"""Name in the form -> the rewards of both answers."""


def form(request: PageRequest) -> Mapping[str, Any]:
    """Load the form, with the prompt of a recorded call if one is chosen."""
    filters = pagination.filters(request.query, "trajectory", "turn", "a", "b", "n")
    trajectory_id = filters.get("trajectory")
    turn = _whole(filters["turn"], "turn", 0, 2**31) if "turn" in filters else None
    values: dict[str, Any] = {"trajectory_id": trajectory_id, "turn": turn, "recorded": None, "why_not": None}
    if trajectory_id is not None:
        call = _recorded(request.connection, request.project, trajectory_id, turn)
        messages = body_of(call.by_id, call.completion.id, call.sampling, None)["messages"]
        values |= {
            "turn": call.completion.turn,
            "recorded": messages_of(messages, MOST_CHARACTERS),
            "why_not": why_not_sent(call.completion),
        }
    models = models_of(request.parts.policies())
    first, second = _suggested(request.parts.policies(), models)
    chosen = {"a": filters.get("a", first), "b": filters.get("b", second)}
    usual = {} if trajectory_id is not None else _usual(request, chosen["b"])
    tokens = usual.get("max_tokens")
    return {
        **values,
        "models": models,
        "chosen": chosen,
        "samples": filters.get("n", str(DEFAULT_SAMPLES)),
        "most_samples": MOST_SAMPLES,
        "tokens": DEFAULT_TOKENS if tokens is None else max(1, min(MOST_TOKENS, int(tokens))),
        "temperature": usual.get("temperature"),
        "usual_of": chosen["b"].partition("@")[0] if usual else None,
    }


def _usual(request: PageRequest, name: str) -> dict[str, float | None]:
    """Return the sampling fields that apps usually send with requests for this policy, so that answers are compared as
    the apps get them; empty if they are unknown."""
    try:
        policy = request.parts.policies().resolve(name).policy
    except ProxyError:
        return {}
    return store_comparisons.usual_sampling(request.connection, request.project, policy)


def models_of(policies: Policies) -> list[str]:
    """Return every name that a side may be: policies, aliases, and the versions that are loaded."""
    return [name for policy in policies for name in policy.names]


def _suggested(policies: Policies, models: Sequence[str]) -> tuple[str, str]:
    """Return what to compare first: version 0 with the live one, or the first two names."""
    for policy in policies:
        if policy.upstream is None and policy.live_version and 0 in policy.served_versions:
            return f"{policy.name}@v0", policy.name
    return (models[0], models[-1]) if models else ("", "")


async def start(request: FormRequest) -> ActionResult:
    """Send the prompt to both sides; the page of the comparison shows the answers as they come.

    Raises:
        BadRequest: a field is missing or invalid, or the recorded call cannot be sent again.
        NotFound: there is no such call.
        UnknownModel: a side has no such name.
        Busy: too many other answers are not complete.
    """
    form, parts = request.form, request.parts
    samples = _whole(form.get("samples", ""), "samples", 1, MOST_SAMPLES)
    sides = {side: form.get(side, "") for side in SIDES}
    for name in sides.values():
        parts.policies().resolve(name)
    body, task, source = await rendering.in_page_thread(_call, request)
    comparison_id = f"compare-{new_id()}"
    calls = [
        EvaluationCall(
            trajectory_id,
            {"model": sides[side], **body},
            evaluation_headers(
                trajectory_id, {"comparison": comparison_id, "side": side, "model": sides[side], **source}, task
            ),
        )
        for number in range(1, samples + 1)
        for side in SIDES
        for trajectory_id in [_trajectory_id(comparison_id, side, number)]
    ]
    parts.comparisons.start(calls, Principal(request.project, request.visitor.key_id, frozenset({"inference"})))
    to = pagination.href(f"{PATH}/{comparison_id}", {**sides, "n": str(samples)})
    return ActionResult(f"{len(calls)} answers were requested", to)


def _call(request: FormRequest) -> tuple[dict[str, Any], str | None, dict[str, str]]:
    """Return the request without its model, the task, and what it repeats."""
    form = request.form
    temperature = _temperature(form.get("temperature", ""))
    if trajectory_id := form.get("trajectory", ""):
        turn = _whole(form.get("turn", ""), "turn", 0, 2**31)
        with request.parts.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            call = _recorded(connection, request.project, trajectory_id, turn)
        if (why := why_not_sent(call.completion)) is not None:
            raise BadRequest(f"turn {turn + 1} of {trajectory_id} cannot be sent: {why}")
        body = body_of(call.by_id, call.completion.id, call.sampling, call.end_user)
        return {**body, **temperature}, call.task, {"replay_of": call.completion.id}
    prompt, system = form.get("prompt", "").strip(), form.get("system", "").strip()
    if not prompt:
        raise BadRequest("enter a prompt", param="prompt")
    if len(prompt) + len(system) > MOST_PROMPT:
        raise BadRequest(f"the prompt is over {MOST_PROMPT} characters", param="prompt")
    messages = [{"role": "system", "content": system}] if system else []
    tokens = _whole(form.get("max_tokens", ""), "max_tokens", 1, MOST_TOKENS)
    messages.append({"role": "user", "content": prompt})
    return {"messages": messages, "max_tokens": tokens, **temperature}, None, {}


def comparison(request: PageRequest) -> Mapping[str, Any]:
    """Load the answers of a comparison, side by side."""
    comparison_id = request.path["comparison_id"]
    started_at = _started_at(comparison_id)
    ids = {
        (number, side): _trajectory_id(comparison_id, side, number)
        for number in range(1, MOST_SAMPLES + 1)
        for side in SIDES
    }
    answers = store_comparisons.answers(request.connection, request.project, list(ids.values()))
    samples = max(
        [number for (number, _), name in ids.items() if name in answers]
        + [int(n) for n in [request.query.get("n", "")] if n in map(str, range(1, MOST_SAMPLES + 1))],
        default=0,
    )
    if not samples:
        raise NotFound(f"there is no comparison {comparison_id!r} in this project")
    own = store_ratings.own(request.connection, request.project, request.visitor.rater, list(answers), ())
    may_come = request.now - started_at < WAITS
    rows = [
        [_answer(ids[number, side], answers.get(ids[number, side]), own, request, may_come=may_come) for side in SIDES]
        for number in range(1, samples + 1)
    ]
    names = {side: _model(answers, side) or request.query.get(side, "") for side in SIDES}
    first = next(iter(answers.values()), None)
    return {
        "comparison_id": comparison_id,
        "started_at": started_at,
        "rows": [{"answers": row, "better": _preference(row)} for row in rows],
        "sides": list(_summaries(rows, names)),
        "prompt": messages_of(first["new_messages"], MOST_CHARACTERS) if first else [],
        "runs": any(one["waits"] for row in rows for one in row),
        "again": pagination.href(PATH, {**names, "n": str(samples), **_source(request, first)}),
    }


def _answer(
    trajectory_id: str,
    row: Mapping[str, Any] | None,
    own: Mapping[str, Mapping[str, Any]],
    request: PageRequest,
    *,
    may_come: bool,
) -> dict[str, Any]:
    failure = request.parts.comparisons.failure(trajectory_id)
    return {
        "trajectory_id": trajectory_id,
        "row": row,
        "message": None if row is None else answer_of(row, MOST_CHARACTERS),
        "own": own.get(trajectory_id),
        "failure": failure or (None if row is not None or may_come else "no answer was recorded"),
        "waits": row is None and failure is None and may_come,
    }


def _summaries(rows: Sequence[Sequence[Mapping[str, Any]]], names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each side."""
    for place, side in enumerate(SIDES):
        answered = [row[place]["row"] for row in rows if row[place]["row"] is not None]
        rewards = [one["reward"] for one in answered if one["reward"] is not None]
        tokens = [one["completion_tokens"] for one in answered if one["completion_tokens"] is not None]
        took_ms = [one["total_ms"] for one in answered if one["total_ms"] is not None]
        yield {
            "side": side,
            "model": names[side],
            "version": next((f"{one['policy']}@v{one['policy_version']}" for one in answered), None),
            "answers": len(answered),
            "rated": len(rewards),
            "reward": statistics.fmean(rewards) if rewards else None,
            "tokens": statistics.fmean(tokens) if tokens else None,
            "seconds": statistics.fmean(took_ms) / 1000 if took_ms else None,
        }


async def prefer(request: FormRequest) -> ActionResult:
    """Store a preference between two answers as feedback: the better one's reward is 1, the other's 0; 0.5 for both if
    they are equally good.

    Raises:
        BadRequest: the form names no preference.
        NotFound: there is no such comparison.
        NotRecorded: the preference could not be stored; then neither reward is.
    """
    comparison_id = request.path["comparison_id"]
    _started_at(comparison_id)
    number = _whole(request.path["number"], "number", 1, MOST_SAMPLES)
    better = request.form.get("better", "")
    if better not in PREFERENCES:
        raise BadRequest("choose the better answer", param="better")
    names = [_trajectory_id(comparison_id, side, number) for side in SIDES]
    comment = request.form.get("comment", "").strip()
    await ratings.save(
        request,
        *(
            {
                "trajectory_id": name,
                "reward": reward,
                "metadata": {"compared_with": other, "better": better},
                **({"comment": comment} if comment else {}),
            }
            for name, other, reward in zip(names, reversed(names), PREFERENCES[better], strict=True)
        ),
    )
    return ActionResult("Saved: both are equally good" if better == "same" else f"Saved: {better.upper()} is better")


def _preference(row: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what the visitor preferred, if that is the last rating of both."""
    chosen = {((one["own"] or {}).get("metadata") or {}).get("better") for one in row}
    return chosen.pop() if len(chosen) == 1 else None


def _source(request: PageRequest, first: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the parameters that lead to the same prompt again, if it is a recorded one."""
    replayed = ((first or {}).get("metadata") or {}).get("replay_of")
    if not isinstance(replayed, str):
        return {}
    place = store_comparisons.place_of(request.connection, request.project, replayed)
    return {} if place is None else {"trajectory": place[0], "turn": str(place[1])}


def _model(answers: Mapping[str, Mapping[str, Any]], side: str) -> str | None:
    """Return the name that a side was requested by."""
    named = (one["metadata"] or {} for one in answers.values())
    return next((str(one["model"]) for one in named if one.get("side") == side and "model" in one), None)


def _recorded(connection: Any, project: str, trajectory_id: str, turn: int | None) -> store_comparisons.RecordedCall:
    call = None
    if ID.fullmatch(trajectory_id):
        call = store_comparisons.recorded_call(connection, project, trajectory_id, turn)
    if call is None:
        raise NotFound(f"there is no such turn of a trajectory {trajectory_id[:200]!r} in this project")
    return call


def _started_at(comparison_id: str) -> datetime:
    match = COMPARISON.fullmatch(comparison_id)
    if match is None:
        raise NotFound(f"there is no comparison {comparison_id[:200]!r} in this project")
    return datetime.fromtimestamp(min(int(match[1], 16) / 1000, 2**33), UTC)


def _trajectory_id(comparison_id: str, side: str, number: int) -> str:
    return f"{comparison_id}.{side}{number}"


def _whole(text: str, name: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise BadRequest(f"{name} must be a whole number from {least} to {most}, not {text[:50]!r}", param=name)
    return int(text)


def _temperature(text: str) -> dict[str, float]:
    if not text.strip():
        return {}
    try:
        temperature = float(text.strip().replace(",", "."))
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= 2:
        raise BadRequest(f"the temperature must be a number from 0 to 2, not {text[:50]!r}", param="temperature")
    return {"temperature": temperature}
