"""Compare what SQL has of a client's run with what passed the tap and what the model server sampled."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, text

from benchmarks.clients.environments import RunResult
from benchmarks.clients.table import TEXTS, Client
from benchmarks.clients.tap import TappedCall

ENOUGH_TRAINABLE = 0.95
COMPLETIONS = text(
    "SELECT completion_id, upstream_id, trajectory_id, endpoint, streamed, completion_tokens, decided_tokens, "
    "constraints, why_not_trained, threaded_by FROM admin_completions ORDER BY created_at, completion_id"
)


@dataclass(frozen=True)
class Row:
    """What one run of a client came to."""

    client: Client
    calls: int
    """Requests that sample, at the tap."""
    refused: Sequence[str]
    """Errors that the client got, each once."""
    recorded: int
    trajectories: int
    sampled: int
    """Tokens that the model server sampled."""
    trainable: int
    """Tokens in completions with ids and without a reason."""
    decided: int | None
    """Tokens that a constraint decided; None: no step has measured it."""
    endpoints: Counter[str]
    reasons: Counter[str]
    constraints: Counter[str]
    threaded_by: Counter[str]
    answered: bool
    """Whether the app ended well, with the last answer."""
    answer_id: str | None
    """The id that the app got from the client, where feedback takes it."""
    named: int | None = None
    """Trajectories of a second run, with the URL that names one; None where there was none."""

    @property
    def share(self) -> float:
        """The trainable share of the sampled tokens."""
        return self.trainable / self.sampled if self.sampled else 0.0

    @property
    def lacking(self) -> dict[str, str]:
        """What does not hold, by name: what a client's `exceptions` may list."""
        checks = {
            "works": (self.answered and not self.refused, f"the app did not end well {list(self.refused)}"),
            "recorded": (self.recorded == self.calls > 0, f"{self.recorded} of {self.calls} calls are recorded"),
            "trajectory": (
                self.trajectories == self.client.trajectories,
                f"{self.trajectories} trajectories, not {self.client.trajectories} {dict(self.threaded_by)}",
            ),
            "trainable": (
                self.share >= ENOUGH_TRAINABLE,
                f"{self.share:.0%} of the sampled tokens are trainable {dict(self.reasons)}",
            ),
            "id": ((self.answer_id is not None) == self.client.tells_id, f"the id for feedback is {self.answer_id}"),
        }
        return {name: fault for name, (holds, fault) in checks.items() if not holds}

    @property
    def faults(self) -> list[str]:
        """What does not hold, and should."""
        excepted = set(self.client.exceptions)
        return [f"{self.client.name}: {fault}" for name, fault in self.lacking.items() if name not in excepted]


def row_of(client: Client, result: RunResult, calls: Sequence[TappedCall], sampled: int, engine: Engine) -> Row:
    """Return the row of a run."""
    with engine.connect() as connection:
        completions = connection.execute(COMPLETIONS).all()
    known = {one.completion_id for one in completions}
    answer = _last_line(result)
    decided = [one.decided_tokens for one in completions if one.decided_tokens is not None]
    # Some clients ask again where they are refused; each error counts once.
    refused = dict.fromkeys(f"{call.status} {call.path}: {(call.error or '')[:300]}" for call in calls if call.error)
    return Row(
        client=client,
        calls=len(calls),
        refused=tuple(refused),
        recorded=sum(call.completion_id in known for call in calls),
        trajectories=len({one.trajectory_id for one in completions}),
        sampled=sampled,
        trainable=sum(one.completion_tokens for one in completions if one.why_not_trained is None),
        decided=sum(decided) if decided else None,
        endpoints=Counter(f"{one.endpoint}{', streamed' if one.streamed else ''}" for one in completions),
        reasons=Counter(one.why_not_trained for one in completions if one.why_not_trained),
        constraints=Counter(name for one in completions for name in _names(one.constraints)),
        threaded_by=Counter(one.threaded_by for one in completions),
        answered=result.exit_code == 0 and TEXTS[-1] in str((answer.get("answers") or [""])[-1]),
        answer_id=answer.get("id") if answer.get("id") in {one.upstream_id for one in completions} else None,
    )


def _last_line(result: RunResult) -> dict[str, Any]:
    """Return what the app printed last; nothing if it is not what an app prints."""
    lines = result.output.strip().splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return {}


def _names(constraints: Any) -> list[str]:
    """Return the names of what bent the sampling, a grammar with its source."""
    values = json.loads(constraints) if isinstance(constraints, str) else constraints or {}
    return [f"grammar of {value}" if name == "grammar" else name for name, value in values.items()]
