"""Probe a candidate: send a few prompts to it and its parent, and compare the answers.

The candidate's tokens, read again by the trainer, show whether vLLM serves what was trained
(`trainer.domain.gate.parity`). The parent's tokens, read by the trainer that now holds the candidate, show how far it
has moved: the mean of k3 = exp(d) - 1 - d with d = candidate's logprob - parent's estimates KL(parent || candidate), in
nats per token (http://joschu.net/blog/kl-approx.html). Lengths, and tool calls where tools were offered, are compared
directly.

What the parent has answered in the step's own rows is not sampled again where it is enough. How many tokens are sampled
and read is bounded by a share of the step's time (`gate.probe_share`).
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from trainer.domain.claims import Claim, Probe, ToolChat
from trainer.domain.figures import mean_k3
from trainer.domain.gate.parity import Parity, Readings, parity, parity_without_share
from trainer.domain.rows import Row
from trainer.domain.timing import Phases
from trainer.errors import TrainerError
from trainer.gate.answers import Answers, Prompt, SteppedRows, from_rows, tokens_like_the_probes, tokens_of
from trainer.learner.engine import Engine
from whetstone.config.gate import GateSettings
from whetstone.vllm.client import Vllm, VllmDown, VllmRefused

LEAST_PROMPTS, MOST_PROMPTS = 2, 8
"""Equal short answers say the same about a server, so there are several prompts; with long ones these are most of what
is read, so there are as many as there is time for, and the first however long it takes.
"""
TOKENS = 16
"""Longest answer to a probe prompt."""
ENOUGH_TOKENS, LEAST_TOKENS = 512, 128
"""Tokens of a version that are compared where there is time for them, since in 16 bits a few tokens carry most of the
noise, and however long it takes.
"""
READINGS = 3
"""How often the candidate's answers are read, at most: with the candidate, the base model, and twice the LoRA."""
MOST_CHOICES = 64
"""Most answers to a prompt that are sampled at once."""
ROUNDS = 4
"""Most requests to a version; with very short answers it stays below ENOUGH_TOKENS."""
PARENT_TOKENS, PARENT_ANSWERS = LEAST_TOKENS, 8
"""Fewest tokens of the step that show the noise of server and trainer, and fewest answers that show distance and
length; with fewer, the parent answers the prompts as well.
"""
DRAWS = 2
"""A candidate that vLLM seems to serve wrongly is asked again, with other seeds, before it is rejected."""
CHATS = 4
TOOL_TOKENS = 128
"""Longest answer in a chat with tools; longer answers are not judged."""
CHAT_TIMEOUT_S = 60.0
BAD_REQUEST, NOT_LOADED = 400, 404
"""A server that was restarted answers 404 for an adapter that it has not loaded."""


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


class _ProbedVersions:
    """The candidate and its parent on one server, with a count of the tokens they sampled."""

    def __init__(self, vllm: Vllm, claim: Claim, budget_s: float, forward_s: float) -> None:
        """`budget_s`: half for sampling, half for reading. `forward_s`: a token in a forward pass. Both in seconds."""
        self._vllm = vllm
        self._parent = claim.name_in
        self._candidate = claim.name_out
        self._sampling_s = budget_s / 2
        self._readable = budget_s / 2 / (READINGS * forward_s)
        self._sampled: list[int] = []  # tokens of each request; threads append to it
        self.sampling_s = 0.0
        """How long they have sampled, without chats, in seconds."""

    @property
    def tokens(self) -> int:
        """How many tokens they have sampled."""
        return sum(self._sampled)

    def as_many_as_fit(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the first of these prompts: so many that there is time to read them beside LEAST_TOKENS of answers."""
        number = min(LEAST_PROMPTS, len(prompts))
        while number < len(prompts) and tokens_of(prompts[: number + 1]) <= self._readable - LEAST_TOKENS:
            number += 1
        return prompts[:number]

    def sample(self, prompts: Sequence[Prompt], draw: int, most: int, length: float, *, parent: bool) -> Answers:
        """Return answers to the prompts, LEAST_TOKENS to ENOUGH_TOKENS tokens, as there is time to sample and read.

        `most`: tokens of the longest answer. `length`: their mean, as far as that is known.
        """
        name = self._parent if parent else self._candidate
        answers = Answers()
        enough = min(ENOUGH_TOKENS, max(LEAST_TOKENS, self._readable - tokens_of(prompts)))
        wanted, began = float(LEAST_TOKENS), time.monotonic()
        for number in range(ROUNDS):
            seed = (draw * ROUNDS + number) * MOST_CHOICES
            choices = min(MOST_CHOICES, math.ceil(wanted / (length * len(prompts))))
            sampled = self._vllm.sample_many(name, prompts, most, seed, choices)
            for prompt_ids, choices_of_prompt in zip(prompts, sampled, strict=True):
                for one in choices_of_prompt:
                    answers.add(prompt_ids, one.token_ids, one.logprobs)
            tokens, took_s = len(answers.logprobs), time.monotonic() - began
            length = answers.length
            in_time = tokens * max(0.0, self._sampling_s / took_s - 1)
            wanted = LEAST_TOKENS - tokens if tokens < LEAST_TOKENS else min(enough - tokens, in_time)
            if wanted <= 0 or (tokens >= LEAST_TOKENS and wanted < length * len(prompts)):
                break
        self._sampled.append(len(answers.logprobs))
        self.sampling_s += time.monotonic() - began
        return answers

    def chat(self, threads: Executor, chats: Sequence[ToolChat], *, parent: bool) -> list[Future[bool | None]]:
        """Send all chats at once; return what `_chat` will return of each."""
        return [threads.submit(self._chat, seed, chat, parent=parent) for seed, chat in enumerate(chats)]

    def _chat(self, seed: int, chat: ToolChat, *, parent: bool) -> bool | None:
        """Return whether the answer calls only offered tools, with JSON objects as arguments.

        None where that is not known: the answer is cut off, or vLLM refuses this chat from any model, for example
        because there is no room for an answer.
        """
        body = {
            "model": self._parent if parent else self._candidate,
            "messages": chat.messages,
            "tools": chat.tools,
            "max_tokens": TOOL_TOKENS,
            "seed": seed,
        }
        try:
            answer = msgspec.convert(self._vllm.answer("POST", "/v1/chat/completions", body, CHAT_TIMEOUT_S), _Chat)
            (choice,) = answer.choices
        except VllmRefused as error:
            if error.status == BAD_REQUEST:
                return None
            raise
        except ValueError as error:
            raise VllmRefused(f"{body['model']} answers, but not as vLLM does: {error}") from error
        self._sampled.append(answer.usage.completion_tokens)
        return None if choice.finish_reason == "length" else _calls(choice.message, chat.tools)


def run_probe(
    vllm: Vllm,
    claim: Claim,
    learner: Engine,
    step: SteppedRows,
    chats: Sequence[ToolChat],
    gate: GateSettings,
    phases: Phases,
) -> Probe:
    """Let candidate and parent answer, and compare. `learner` holds the candidate, `phases` are the step's so far.

    Raises:
        CandidateUnfit: a number is not finite, or one is out of its bounds (`gate.max_k3` and those below it).
        VllmDown: the server cannot be reached, or has lost what it had loaded.
    """
    budget_s = phases.elapsed_s * gate.probe_share / (1 - gate.probe_share)
    speakers = _ProbedVersions(vllm, claim, budget_s, step.forward_s)
    try:
        # Chats take as long as the rest, in which the server would otherwise wait for the trainer.
        with ThreadPoolExecutor(max_workers=2 * CHATS) as threads:
            called = {
                "tool_calls": speakers.chat(threads, chats, parent=False),
                "parent_tool_calls": speakers.chat(threads, chats, parent=True),
            }
            return _measured(speakers, claim, learner, step, called, gate, phases)
    except VllmRefused as error:
        if error.status == NOT_LOADED or not vllm.healthy():
            raise VllmDown(f"it went away, and with it what it had loaded: {error}") from error
        raise CandidateUnfit(f"it does not answer: {error}", Probe(None, speakers.tokens)) from error


def _measured(
    speakers: _ProbedVersions,
    claim: Claim,
    learner: Engine,
    step: SteppedRows,
    called: Mapping[str, Sequence[Future[bool | None]]],
    gate: GateSettings,
    phases: Phases,
) -> Probe:
    renew = phases.renew
    in_step = from_rows(step.rows, claim.version_in, TOKENS)
    prompts = speakers.as_many_as_fit(in_step.common_prompts(MOST_PROMPTS) or _first_prompts(step.rows))
    before = in_step.to(set(prompts))
    most, length = (before.longest(TOKENS, learner.ends), before.length) if before.answers else (TOKENS, TOKENS)
    noise = step.mismatch_k3 if tokens_like_the_probes(step.rows, claim.version_in) >= PARENT_TOKENS else None
    reading_s = 0.0
    for draw in range(DRAWS):
        own = speakers.sample(prompts, draw, most, length, parent=False)
        renew()
        if noise is None or len(before.answers) < PARENT_ANSWERS:
            before = speakers.sample(prompts, draw, most, length, parent=True)
            renew()
        with phases.computing():
            began = time.monotonic()
            if noise is None:
                with learner.as_version(claim.adapter_in):
                    noise = mean_k3(before.logprobs, before.read_by(learner))
            served, moved = _compared(own, before, noise, learner)
            reading_s += time.monotonic() - began
        why_not = served.why_not(gate.max_k3, learner.quantisation)
        if why_not is None:
            break
        log.warning("step %s: draw %d of %d: %s", claim.id, draw + 1, DRAWS, why_not)
        noise = None  # the next draw samples both
        renew()
    took = {"sampling_s": speakers.sampling_s, "reading_s": reading_s}
    calls = {name: [call for chat in chats if (call := chat.result()) is not None] for name, chats in called.items()}
    renew()
    figures = {
        "k3": served.k3,
        "parent_k3": served.parent_k3,
        "served_share": served.share,
        "served_share_error": served.error,
        **took,
    }
    if why_not is not None:
        raise CandidateUnfit(why_not, _probe(speakers, served.k3, figures))
    figures |= {
        "parent_kl": moved,
        "length": own.length,
        "parent_length": before.length,
        "length_ratio": own.length / before.length,
    }
    figures |= {name: sum(known) / len(known) for name, known in calls.items() if known}
    probe = _probe(speakers, served.k3, figures)
    too_far = _out_of_bounds(figures, gate)
    if too_far is not None:
        raise CandidateUnfit(too_far, probe)
    return probe


def _first_prompts(rows: Sequence[Row]) -> list[Prompt]:
    """Return the first prompts of the rows, for a step without an answer of the parent."""
    return list(dict.fromkeys(row.token_ids_T[: row.sampled_T.index(True)] for row in rows))[:MOST_PROMPTS]


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


def _compared(own: Answers, before: Answers, noise: float, learner: Engine) -> tuple[Parity, float]:
    """Return how far vLLM and the trainer agree on the candidate's answers, and how far it is from its parent, in nats.

    `learner` holds the candidate; `noise` is its parent's k3.
    """
    both = own.beside(before).read_by(learner)  # equal prompts are read once
    trained, before_T = both[: len(own.logprobs)], both[len(own.logprobs) :]
    with learner.as_version(None):
        readings = Readings(own.logprobs, trained, own.read_by(learner), contexts=own.contexts)
    if not readings.is_effect_large(noise):
        if not learner.can_double:
            return parity_without_share(readings, noise), mean_k3(before.logprobs, before_T)
        with learner.doubled():
            readings = replace(readings, doubled=own.read_by(learner))
    return parity(readings, noise), mean_k3(before.logprobs, before_T)


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
