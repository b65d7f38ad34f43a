"""Probe a candidate: send a few prompts to it and its parent, and compare the answers.

The candidate's tokens, read again by the trainer, show whether vLLM serves what was trained (`trainer.domain.parity`).
The parent's tokens, read by the trainer that now holds the candidate, show how far it has moved: the mean of k3 =
exp(d) - 1 - d with d = candidate's logprob - parent's estimates KL(parent || candidate), in nats per token
(http://joschu.net/blog/kl-approx.html). Lengths, and tool calls where tools were offered, are compared directly.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trainer.domain.claims import Claim, Probe, ToolChat
from trainer.domain.figures import mean_k3
from trainer.domain.parity import Parity, Readings, parity
from trainer.domain.rows import Answer, Row
from trainer.errors import TrainerError
from trainer.learner.learner import Learner
from whetstone.config.gate import GateSettings
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused

PROMPTS = 4
TOKENS = 16
"""Longest answer to a probe prompt."""
ENOUGH_TOKENS = 512
"""Tokens of each version that are compared: in 16 bits a few tokens carry most of the noise."""
CHOICES, MOST_CHOICES = 8, 64
"""Answers to a prompt that are sampled at once: the first time, and at most."""
ROUNDS = 4
"""Most times that a version is asked; with very short answers it stays below ENOUGH_TOKENS."""
DRAWS = 2
"""A candidate that vLLM seems to serve wrongly is asked again, with other seeds, before it is rejected."""
CHATS = 4
TOOL_TOKENS = 128
"""Longest answer in a chat with tools; longer answers are not judged."""
CHAT_TIMEOUT_S = 60.0
BAD_REQUEST, NOT_LOADED = 400, 404
"""A server that was restarted answers 404 for an adapter that it has not loaded."""


Prompt = tuple[int, ...]

log = logging.getLogger(__name__)


class CandidateUnfit(TrainerError):
    """The candidate does not pass the gate."""

    def __init__(self, reason: str, probe: Probe) -> None:
        super().__init__(reason)
        self.probe = probe


class _ToolCall(msgspec.Struct):
    """A tool call of an answer."""

    class Function(msgspec.Struct):
        name: str
        arguments: str

    function: Function


class _Message(msgspec.Struct):
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chat(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers of one version, and vLLM's logprobs of all their tokens, in nats."""

    answers: list[Answer]
    logprobs: list[float]

    @property
    def length(self) -> float:
        """Mean tokens of an answer."""
        return len(self.logprobs) / len(self.answers)

    def read_by(self, learner: Learner) -> list[float]:
        """Return the trainer's logprobs of the tokens, with the weights that the learner has now."""
        return [logprob for logprobs in learner.logprobs_of(self.answers) for logprob in logprobs]


class _ProbedVersions:
    """The candidate and its parent on one server, with a count of the tokens they sampled."""

    def __init__(self, vllm: Vllm, claim: Claim) -> None:
        self._vllm = vllm
        self._parent = claim.name_in
        self._candidate = claim.name_out
        self.tokens = 0

    def sample(self, prompts: Sequence[Prompt], draw: int, *, parent: bool) -> "_Answers":
        """Return answers to the prompts, with at least ENOUGH_TOKENS tokens unless all are very short."""
        name = self._parent if parent else self._candidate
        answers = _Answers([], [])
        choices = CHOICES
        for number in range(ROUNDS):
            seed = (draw * ROUNDS + number) * MOST_CHOICES
            for prompt_ids, sampled in zip(
                prompts, self._vllm.sample_many(name, prompts, TOKENS, seed, choices), strict=True
            ):
                answers.answers.extend(Answer("", prompt_ids, tuple(one.token_ids)) for one in sampled)
                answers.logprobs.extend(logprob for one in sampled for logprob in one.logprobs)
            tokens = len(answers.logprobs)
            if tokens >= ENOUGH_TOKENS:
                break
            expected = tokens / len(answers.answers) * len(prompts)
            choices = min(MOST_CHOICES, math.ceil((ENOUGH_TOKENS - tokens) / expected))
        self.tokens += len(answers.logprobs)
        return answers

    def called(self, chats: Sequence[ToolChat], *, parent: bool) -> list[bool]:
        """Return, for each complete answer, whether it calls only offered tools, with JSON objects as arguments."""
        valid = []
        for seed, chat in enumerate(chats):
            body = {
                "model": self._parent if parent else self._candidate,
                "messages": chat.messages,
                "tools": chat.tools,
                "max_tokens": TOOL_TOKENS,
                "seed": seed,
            }
            try:
                chat_response = msgspec.convert(
                    self._vllm.answer("POST", "/v1/chat/completions", body, CHAT_TIMEOUT_S), _Chat
                )
                (choice,) = chat_response.choices
            except VllmRefused as error:
                if error.status == BAD_REQUEST:  # about this chat, for any model: for example, no room for an answer
                    continue
                raise
            except ValueError as error:
                raise VllmRefused(f"{body['model']} answers, but not as vLLM does: {error}") from error
            self.tokens += chat_response.usage.completion_tokens
            if choice.finish_reason != "length":
                valid.append(_calls(choice.message, chat.tools))
        return valid


def run_probe(
    vllm: Vllm,
    claim: Claim,
    learner: Learner,
    rows: Sequence[Row],
    chats: Sequence[ToolChat],
    gate: GateSettings,
    renew: Callable[[], None],
) -> Probe:
    """Let candidate and parent answer, and compare. `learner` holds the candidate, `renew` renews the step's lease.

    Raises:
        CandidateUnfit: a number is not finite, or one is out of its bounds (`gate.max_k3` and those below it).
        VllmDown: the server cannot be reached, or has lost what it had loaded.
    """
    speakers = _ProbedVersions(vllm, claim)
    try:
        return _measured(speakers, claim, learner, rows, chats, gate, renew)
    except VllmRefused as error:
        if error.status == NOT_LOADED or not vllm.healthy():
            raise VllmDown(f"it went away, and with it what it had loaded: {error}") from error
        raise CandidateUnfit(f"it does not answer: {error}", Probe(None, speakers.tokens)) from error


def _measured(
    speakers: _ProbedVersions,
    claim: Claim,
    learner: Learner,
    rows: Sequence[Row],
    chats: Sequence[ToolChat],
    gate: GateSettings,
    renew: Callable[[], None],
) -> Probe:
    prompts = list(dict.fromkeys(row.token_ids_T[: row.sampled_T.index(True)] for row in rows))[:PROMPTS]
    for draw in range(DRAWS):
        own = speakers.sample(prompts, draw, parent=False)
        renew()
        before = speakers.sample(prompts, draw, parent=True)
        renew()
        served = _parity(own, before, learner, claim)
        why_not = served.why_not(gate.max_k3)
        if why_not is None:
            break
        log.warning("step %s: draw %d of %d: %s", claim.id, draw + 1, DRAWS, why_not)
        renew()
    figures = {
        "k3": served.k3,
        "parent_k3": served.parent_k3,
        "served_share": served.share,
        "served_share_error": served.error,
    }
    if why_not is not None:
        raise CandidateUnfit(why_not, _probe(speakers, served.k3, figures))
    figures |= {
        "parent_kl": mean_k3(before.logprobs, before.read_by(learner)),
        "length": own.length,
        "parent_length": before.length,
        "length_ratio": own.length / before.length,
    }
    if chats:
        for name, parent in (("tool_calls", False), ("parent_tool_calls", True)):
            if called := speakers.called(chats, parent=parent):
                figures[name] = sum(called) / len(called)
    probe = _probe(speakers, served.k3, figures)
    too_far = _out_of_bounds(figures, gate)
    if too_far is not None:
        raise CandidateUnfit(too_far, probe)
    return probe


def _out_of_bounds(figures: Mapping[str, float], gate: GateSettings) -> str | None:
    """Return why the candidate is too far from its parent; None where it is not."""
    distance, ratio = figures["parent_kl"], figures["length_ratio"]
    if not distance <= gate.max_parent_kl:
        return f"too far from its parent: k3 {distance:.3g} nats a token, allowed are {gate.max_parent_kl:g}"
    if max(ratio, 1 / ratio) > gate.max_length_ratio:
        return f"its answers are {ratio:.3g} times as long as its parent's; allowed is {gate.max_length_ratio:g}"
    if "tool_calls" in figures and "parent_tool_calls" in figures:
        called, before = figures["tool_calls"], figures["parent_tool_calls"]
        if before - called > gate.max_parse_loss:
            return f"{called:.0%} of its answers make tool calls that can be read, of its parent's {before:.0%}"
    return None


def _parity(own: _Answers, before: _Answers, learner: Learner, claim: Claim) -> Parity:
    """Compare vLLM's logprobs with the trainer's. `learner` holds the candidate."""
    with learner.as_version(claim.adapter_in):
        parent = before.read_by(learner)
    with learner.as_version(None):
        base = own.read_by(learner)
    with learner.doubled():
        doubled = own.read_by(learner)
    return parity(Readings(own.logprobs, own.read_by(learner), base, doubled), before.logprobs, parent)


def _probe(speakers: _ProbedVersions, k3: float, figures: Mapping[str, float]) -> Probe:
    """Build the probe with its finite figures only: JSON has no others."""
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    return Probe(k3, speakers.tokens, {**finite, "tokens": speakers.tokens})


def _calls(message: _Message, tools: Sequence[Any]) -> bool:
    offered = {tool["function"]["name"] for tool in tools if tool.get("type") == "function"}
    calls = message.tool_calls or []
    return bool(calls) and all(call.function.name in offered and _is_object(call.function.arguments) for call in calls)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except msgspec.DecodeError:
        return False
