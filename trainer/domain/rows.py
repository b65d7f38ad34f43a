"""Merge completions into training rows. Works on token ids only.

A row is one sequence that a forward pass reads from left to right. Turns of a conversation share one row as long as
each prompt repeats, id for id, all earlier prompts and answers. Where it does not (a template that drops old thinking,
a compaction, a sub-agent, a retry), another row begins. Every sampled token is trained exactly once: in the row where
it was appended. A later row that repeats it has it as prompt.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trainer.domain.constraints import ConstrainedSpan, Constraints
from trainer.errors import RowError

LOGPROB_NOISE = 1e-4
"""Largest logprob above 0 that float32 rounding explains, in nats; a server's softmax stays well below it."""
MINUS_INFINITY = -9999.0
"""The value that vLLM writes for minus infinity, which JSON lacks: such a token cannot have been sampled."""


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """One completion with its whole prompt, as the server returned it."""

    completion_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Sampled ids; empty for an answer cut off before its first token."""
    logprobs: tuple[float, ...]
    """Nats, one per sampled id, at `temperature`."""
    version: int
    """The policy version that sampled it."""
    temperature: float
    constraints: Constraints | None = None
    """What bent the distribution it was sampled from, besides the temperature."""
    turn: int = 0
    """Its place in the trajectory, from 0."""
    tool_tokens: int = 0
    """How many ids at the end of its prompt tools gave, since the answer before it; 0 where that is not wanted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to imitate, from any source, with its whole prompt."""

    source_id: str
    """Id of the record that it was made from."""
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence of T tokens; per-token fields have one entry for each token."""

    trajectory_id: str
    token_ids_T: tuple[int, ...]
    sampled_T: tuple[bool, ...]
    """True where the policy sampled the token, or is to imitate it, and this row trains it."""
    inference_logprobs_T: tuple[float, ...]
    """Nats; NaN where the policy did not sample the token."""
    versions_T: tuple[int, ...]
    """Version that sampled the token; -1 where none did."""
    temperatures_T: tuple[float, ...]
    """1.0 where not sampled."""
    advantages_T: tuple[float, ...]
    """0.0 where not sampled. Of preferences 1 where good or better, -1 where bad or worse."""
    constrained: tuple[ConstrainedSpan, ...] = ()
    """The completions whose sampling was constrained, in order."""
    pair: str = ""
    """Name of the pair of trajectories that it belongs to, where a step compares pairs."""
    teacher_ids: tuple[int, ...] = ()
    """The prompt with a correction in it, where a step learns from words."""
    top_ids_N: tuple[tuple[int, ...], ...] = ()
    """A teacher's likeliest tokens at each of the N sampled tokens, where a step learns from a teacher ..."""
    top_logprobs_N: tuple[tuple[float, ...], ...] = ()
    """... and their logprobs, in nats."""
    tool_spans: tuple[tuple[int, int], ...] = ()
    """Where tokens begin and end that tools gave between two answers; empty where they are only read."""
    replayed: bool = False
    """It is of a past attempt, imitated beside rows that learn from rewards: `rows_for_sft`."""


@dataclass(slots=True)
class _Growing:
    """A row that later turns may still extend."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    constrained: list[ConstrainedSpan] = field(default_factory=list)
    tool_spans: list[tuple[int, int]] = field(default_factory=list)

    def begins(self, prompt_ids: tuple[int, ...]) -> bool:
        """Return whether the prompt repeats this row id for id."""
        length = len(self.token_ids)
        return length <= len(prompt_ids) and self.token_ids == list(prompt_ids[:length])

    def read(self, token_ids: Sequence[int], tool_tokens: int) -> None:
        """Append what was not sampled. `tool_tokens`: how many of its last tools gave, after an answer in this row."""
        start = len(self.token_ids)
        self._append(token_ids, False, [math.nan] * len(token_ids), -1, 1.0, 0.0)
        end = len(self.token_ids)
        if start and tool_tokens and end > start:
            self.tool_spans.append((max(start, end - tool_tokens), end))

    def speak(self, completion: SampledCompletion, advantage: float) -> None:
        start = len(self.token_ids)
        self._append(
            completion.token_ids, True, completion.logprobs, completion.version, completion.temperature, advantage
        )
        if completion.constraints is not None:
            end = len(self.token_ids)
            self.constrained.append(ConstrainedSpan(completion.completion_id, start, end, completion.constraints))

    def _append(
        self,
        token_ids: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        version: int,
        temperature: float,
        advantage: float,
    ) -> None:
        self.token_ids.extend(token_ids)
        self.sampled.extend([sampled] * len(token_ids))
        self.logprobs.extend(logprobs)
        self.versions.extend([version] * len(token_ids))
        self.temperatures.extend([temperature] * len(token_ids))
        self.advantages.extend([advantage] * len(token_ids))


def merge(
    trajectory_id: str, completions: Iterable[SampledCompletion], advantage: float | Sequence[float]
) -> list[Row]:
    """Return the rows of one trajectory.

    `completions` come in turn order. `advantage`: that of all their tokens, or one for each completion. A completion
    whose prompt begins with a row (its last prompt and answer) is appended to that row, to the longest such row if
    there are several; else it begins a new row. A completion without tokens adds nothing.

    Raises:
        RowError: ids and logprobs differ in number, a logprob is NaN, infinite or above 0, an id is negative, a
            prompt is empty (nothing predicts its first token), a temperature or an advantage cannot be used.
    """
    checked = list(completions)
    advantages = [advantage] * len(checked) if isinstance(advantage, int | float) else advantage
    for one in advantages:
        if not math.isfinite(one):
            raise RowError(f"trajectory {trajectory_id}: advantage {one} is not a finite number")
    for completion in checked:
        check(completion)
    return _rows(trajectory_id, checked, advantages)


def rows_for_sft(trajectory_id: str, answers: Iterable[Answer], advantage: float = 1.0) -> list[Row]:
    """Return the rows of answers to imitate, merged as by `merge`; no logprobs, no version.

    `answers` come in turn order. `advantage`: of all their tokens.

    Raises:
        RowError: an id is negative, or a prompt is empty.
    """
    unsampled = []
    for answer in answers:
        _check_ids(f"answer {answer.source_id}", answer.prompt_ids, answer.token_ids)
        no_logprobs = (math.nan,) * len(answer.token_ids)
        unsampled.append(SampledCompletion(answer.source_id, answer.prompt_ids, answer.token_ids, no_logprobs, -1, 1.0))
    return _rows(trajectory_id, unsampled, [advantage] * len(unsampled))


def _rows(trajectory_id: str, completions: Sequence[SampledCompletion], advantages: Sequence[float]) -> list[Row]:
    rows: list[_Growing] = []
    for completion, advantage in zip(completions, advantages, strict=True):
        if not completion.token_ids:
            continue
        row = max(
            (row for row in rows if row.begins(completion.prompt_ids)), key=lambda row: len(row.token_ids), default=None
        )
        if row is None:
            row = _Growing()
            rows.append(row)
        row.read(completion.prompt_ids[len(row.token_ids) :], completion.tool_tokens)
        row.speak(completion, advantage)
    return [
        Row(
            trajectory_id=trajectory_id,
            token_ids_T=tuple(row.token_ids),
            sampled_T=tuple(row.sampled),
            inference_logprobs_T=tuple(row.logprobs),
            versions_T=tuple(row.versions),
            temperatures_T=tuple(row.temperatures),
            advantages_T=tuple(row.advantages),
            constrained=tuple(row.constrained),
            tool_spans=tuple(row.tool_spans),
        )
        for row in rows
    ]


def check(completion: SampledCompletion) -> None:
    """Raise RowError, naming the completion, unless it can be trained on."""

    def refuse(why: str) -> RowError:
        return RowError(f"completion {completion.completion_id}: {why}")

    if len(completion.token_ids) != len(completion.logprobs):
        raise refuse(f"{len(completion.token_ids)} token ids but {len(completion.logprobs)} logprobs")
    _check_ids(f"completion {completion.completion_id}", completion.prompt_ids, completion.token_ids)
    for place, logprob in enumerate(completion.logprobs):
        if not MINUS_INFINITY < logprob <= LOGPROB_NOISE:
            raise refuse(f"logprob {logprob} of sampled token {place} is not the logarithm of a probability")
    if not math.isfinite(completion.temperature) or completion.temperature <= 0:
        raise refuse(f"temperature {completion.temperature} is not above 0")
    if completion.version < 0:
        raise refuse(f"version {completion.version} is negative")


def _check_ids(name: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    if not prompt_ids:
        raise RowError(f"{name}: the prompt has no ids, so nothing predicts the first sampled token")
    if min(prompt_ids) < 0 or min(token_ids, default=0) < 0:
        raise RowError(f"{name}: a token id is negative")
