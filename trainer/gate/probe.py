"""Probe a candidate: send a few prompts to it and its parent, and compare the answers.

The candidate's tokens, read again by the trainer, show whether vLLM serves what was trained (k3 of server to trainer).
The parent's tokens, read by the trainer that now holds the candidate, show how far it has moved: the mean of k3 =
exp(d) - 1 - d with d = candidate's logprob - parent's estimates KL(parent || candidate), in nats per token
(http://joschu.net/blog/kl-approx.html). Lengths, and tool calls where tools were offered, are compared directly.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trainer.domain.claims import Claim, Probe, ToolChat
from trainer.domain.figures import mean_k3
from trainer.domain.rows import Row
from trainer.errors import TrainerError
from trainer.learner.learner import Learner
from whetstone.config.gate import GateSettings
from whetstone.vllm.client import SampledTokens, Vllm, VllmDown, VllmRefused

PROMPTS = 4
TOKENS = 16
"""Longest answer to a probe prompt. All answers are below 200 tokens: well under a second for the starter model."""
CHATS = 4
TOOL_TOKENS = 128
"""Longest answer in a chat with tools; longer answers are not judged."""
CHAT_TIMEOUT_S = 60.0
BAD_REQUEST, NOT_LOADED = 400, 404
"""A server that was restarted answers 404 for an adapter that it has not loaded."""


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


class _ProbedVersions:
    """The candidate and its parent on one server, with a count of the tokens they sampled."""

    def __init__(self, vllm: Vllm, claim: Claim) -> None:
        self._vllm = vllm
        self._parent = claim.name_in
        self._candidate = claim.name_out
        self.tokens = 0

    def sample(self, prompts: Sequence[Sequence[int]], *, parent: bool) -> list[SampledTokens]:
        """Return an answer to each prompt."""
        name = self._parent if parent else self._candidate
        answers = []
        for seed, prompt_ids in enumerate(prompts):
            answers.append(self._vllm.sample(name, prompt_ids, TOKENS, seed))
            self.tokens += len(answers[-1].token_ids)
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
    vllm: Vllm, claim: Claim, learner: Learner, rows: Sequence[Row], chats: Sequence[ToolChat], gate: GateSettings
) -> Probe:
    """Let candidate and parent answer, and compare. `learner` holds the candidate.

    Raises:
        CandidateUnfit: a number is not finite, or one is out of its bounds (`gate.max_k3` and those below it).
        VllmDown: the server cannot be reached, or has lost what it had loaded.
    """
    speakers = _ProbedVersions(vllm, claim)
    try:
        return _measured(speakers, learner, rows, chats, gate)
    except VllmRefused as error:
        if error.status == NOT_LOADED or not vllm.healthy():
            raise VllmDown(f"it went away, and with it what it had loaded: {error}") from error
        raise CandidateUnfit(f"it does not answer: {error}", Probe(None, speakers.tokens)) from error


def _measured(
    speakers: _ProbedVersions, learner: Learner, rows: Sequence[Row], chats: Sequence[ToolChat], gate: GateSettings
) -> Probe:
    prompts = list(dict.fromkeys(row.token_ids_T[: row.sampled_T.index(True)] for row in rows))[:PROMPTS]
    own = speakers.sample(prompts, parent=False)
    k3 = _distance(prompts, own, learner)
    if not k3 <= gate.max_k3:
        why = f"vLLM and trainer disagree: k3 {k3:.3g} nats a token, allowed are {gate.max_k3:g}"
        raise CandidateUnfit(why, _probe(speakers, k3, {"k3": k3}))
    before = speakers.sample(prompts, parent=True)
    lengths = [math.fsum(len(one.token_ids) for one in answers) / len(answers) for answers in (own, before)]
    figures = {
        "k3": k3,
        "parent_kl": _distance(prompts, before, learner),
        "length": lengths[0],
        "parent_length": lengths[1],
        "length_ratio": lengths[0] / lengths[1],
    }
    if chats:
        for name, parent in (("tool_calls", False), ("parent_tool_calls", True)):
            if called := speakers.called(chats, parent=parent):
                figures[name] = sum(called) / len(called)
    probe = _probe(speakers, k3, figures)
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


def _distance(prompts: Sequence[Sequence[int]], answers: Sequence[SampledTokens], learner: Learner) -> float:
    """Return the mean k3 from vLLM's logprobs to the trainer's; not finite where a logprob is not."""
    inference = [logprob for one in answers for logprob in one.logprobs]
    trainer = [
        logprob
        for prompt_ids, one in zip(prompts, answers, strict=True)
        for logprob in learner.logprobs(prompt_ids, one.token_ids)
    ]
    return mean_k3(inference, trainer)


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
