"""Tell what each field of a request does to the sampling: the table of docs/parameters.md. Pure.

Three classes, the same in every dialect: a field is *neutral*, *weighed* or *never* to be trained on (`Effect`). So is
a field without a class. Everything here was read in vLLM 0.32; `source` says where.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any

import msgspec

from proxy.wire.decoding import Number, raw
from proxy.wire.interfaces import UNREADABLE
from proxy.wire.request_body import Body, exploring, whole
from whetstone.domain.why_not_trained import WhyNotTrained

BUDGET = "thinking_token_budget"
"""The source of a grammar that is none of the structured outputs."""
LARGEST_BIAS = 100.0
"""vLLM reduces a larger bias of either sign to this one (`SamplingParams.from_optional`)."""
LARGEST_COUNT = 2**31 - 1
"""No count of tokens is larger."""


class Effect(StrEnum):
    """What a field does to the distribution that tokens are sampled from."""

    NEUTRAL = "neutral"
    """Nothing, or it changes only the prompt, whose ids are recorded, the answer's form, or its end."""
    WEIGHED = "weighed"
    """It bends the distribution, and the trainer accounts for it."""
    NEVER = "never"
    """It bends the distribution in a way that ids and logprobs do not show: no step trains on the answer."""


class ParameterGroup(msgspec.Struct, frozen=True):
    """Fields with the same effect."""

    effect: Effect
    names: str
    """Separated by spaces."""
    meaning: str
    source: str
    """Where vLLM shows it, below its folder `vllm/`."""


GROUPS = (
    ParameterGroup(
        Effect.NEUTRAL,
        "messages prompt suffix documents reasoning_effort chat_template_kwargs add_generation_prompt "
        "continue_final_message add_special_tokens truncate_prompt_tokens truncation_side media_io_kwargs",
        "make the prompt, whose token ids are recorded",
        "`build_chat_params`, `build_tok_params` (entrypoints/openai/chat_completion/protocol.py); "
        "`render_completion` (renderers/online_renderer.py)",
    ),
    ParameterGroup(
        Effect.NEUTRAL,
        "max_tokens max_completion_tokens stop stop_token_ids ignore_eos repetition_detection",
        "decide where an answer ends; the tokens before are sampled as without them",
        "`check_stop` (v1/core/sched/utils.py); `BaseIncrementalDetokenizer.update` (v1/engine/detokenizer.py)",
    ),
    ParameterGroup(
        Effect.NEUTRAL,
        "n seed",
        "how many answers are sampled, and with which random numbers; answers with equal seeds cannot differ: "
        "`fixed_seed`",
        "`SamplingParams` (sampling_params.py)",
    ),
    ParameterGroup(
        Effect.NEUTRAL,
        "stream stream_options stream_interval logprobs top_logprobs logprob_token_ids return_token_ids "
        "return_tokens_as_token_ids return_prompt_text return_token_offsets return_mm_kwargs mm_payload "
        "routed_experts_prompt_start include_reasoning include_stop_str_in_output skip_special_tokens "
        "spaces_between_special_tokens echo",
        "the answer's form, and what comes beside its text; an `echo` has no logprobs of its own: `no_logprobs`",
        "`OpenAIServingChat` (entrypoints/openai/chat_completion/serving.py); `Sampler.forward` (v1/sample/sampler.py)",
    ),
    ParameterGroup(
        Effect.NEUTRAL,
        "model session_id length_penalty user metadata service_tier store prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier verbosity modalities audio prediction moderation web_search_options "
        "function_call functions best_of",
        "nothing: vLLM ignores them, or takes them for names (`model`, `session_id`), or for beams only "
        "(`length_penalty`)",
        "`OpenAIBaseModel` (entrypoints/serve/engine/protocol.py) accepts and ignores fields that it does not have; "
        "`BlockPool` (v1/core/block_pool.py); `to_beam_search_params` (entrypoints/openai/chat_completion/protocol.py)",
    ),
    ParameterGroup(
        Effect.WEIGHED,
        "temperature",
        "the trainer divides logits by it, as vLLM does; at 0 nothing is sampled, so never: `greedy`",
        "`Sampler.apply_temperature` (v1/sample/sampler.py)",
    ),
    ParameterGroup(
        Effect.WEIGHED,
        "allowed_token_ids min_tokens logit_bias repetition_penalty frequency_penalty presence_penalty",
        "change logits by a rule that depends on the ids only; the trainer applies it again",
        "`Sampler.apply_logits_processors` (v1/sample/sampler.py); v1/sample/logits_processor/builtin.py; "
        "v1/sample/ops/penalties.py",
    ),
    ParameterGroup(
        Effect.WEIGHED,
        "min_p top_k top_p",
        "leave out tokens with small probabilities; the trainer computes which",
        "`MinPLogitsProcessor` (v1/sample/logits_processor/builtin.py); v1/sample/ops/topk_topp_sampler.py",
    ),
    ParameterGroup(
        Effect.WEIGHED,
        "tools tool_choice parallel_tool_calls response_format structured_outputs thinking_token_budget",
        "a grammar: strict tools (or `parallel_tool_calls: false`) beside `tool_choice: auto` from a tool call's "
        "marker on; `tool_choice` that requires a call; a `response_format` other than text; `structured_outputs`; and "
        "thoughts that reach their budget are ended; the trainer measures which tokens were decided so",
        "`DelegatingParser._apply_structural_tag` (parser/abstract_parser.py), `ToolParser.adjust_request` "
        "(tool_parsers/abstract_tool_parser.py), `structured_outputs_from_response_format` "
        "(entrypoints/generate/base/protocol.py), `ThinkingBudgetStateHolder` (v1/sample/thinking_budget_state.py)",
    ),
    ParameterGroup(
        Effect.NEVER,
        "bad_words",
        "forbids words, and only the server's tokenizer tells which ids those are",
        "`SamplingParams.update_from_tokenizer` (sampling_params.py)",
    ),
    ParameterGroup(
        Effect.NEVER,
        "use_beam_search",
        "searches for likely answers instead of sampling",
        "`ChatCompletionRequest.to_beam_search_params` (entrypoints/openai/chat_completion/protocol.py)",
    ),
    ParameterGroup(
        Effect.NEVER,
        "watermarking",
        "draws tokens by a secret key of the server",
        "`GumbelWatermarker` (v1/watermarking/gumbel.py)",
    ),
)
"""The table. tests/unit/proxy/wire/test_parameters.py compares it with vLLM's fields and with OpenAI's."""

EFFECTS: Mapping[str, Effect] = {name: group.effect for group in GROUPS for name in group.names.split()}
"""Field -> its class."""

_PLAIN = frozenset(name for name, effect in EFFECTS.items() if effect is Effect.NEUTRAL) | {"temperature"}
"""Fields that constrain nothing, whatever their values: most requests have no other."""
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "use_beam_search": (False,),
    "watermarking": (False,),
}
"""Values at which a field of the class "never" changes nothing."""

Reader = Callable[[Any], Any]
"""Reads a value as vLLM does: what to record, or None if it changes nothing.

Raises one of _UNREADABLE for a value that vLLM would refuse."""
_UNREADABLE = (*UNREADABLE, OverflowError)


def _number(harmless: float) -> Reader:
    def read(value: Any) -> float | None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is not finite")
        return None if number == harmless else number

    return read


def _count(value: Any) -> int | None:
    """Read a whole number that changes nothing unless it is above 0."""
    number = whole(value)
    if number is None or number > LARGEST_COUNT:
        raise ValueError(f"{value!r} is no count")
    return number if number > 0 else None


def _biases(value: Any) -> dict[str, float] | None:
    biases = {str(int(token)): min(LARGEST_BIAS, max(-LARGEST_BIAS, float(bias))) for token, bias in value.items()}
    return {token: bias for token, bias in biases.items() if bias} or None


def _token_ids(value: Any) -> list[int]:
    return msgspec.convert(value, list[Number], strict=False)


_CONSTRAINTS: Mapping[str, Reader] = {
    "allowed_token_ids": _token_ids,
    "min_tokens": _count,
    "logit_bias": _biases,
    "repetition_penalty": _number(1),
    "frequency_penalty": _number(0),
    "presence_penalty": _number(0),
    "min_p": _number(0),
    "top_k": _count,
    "top_p": _number(1),
}
"""Fields that are recorded among the constraints -> how each is read."""


class SampledRequest(ABC):
    """What requests of both kinds that vLLM samples answers to have in common."""

    capturable: bool
    """Whether the answer may be asked for token ids and logprobs."""

    def __init__(self, body: Body, captured: bool) -> None:
        """`captured`: vLLM answers it."""
        self._body = self._original = body
        """What vLLM gets, and what the app sent."""
        self._for_vllm = captured

    @abstractmethod
    def why_not_trained(self) -> str | None:
        """Return why no step may train on the answer, or None if it may."""

    def explore(self, temperature: float) -> bool:
        """Sample at this temperature instead of 0, if nothing else keeps the answer from training."""
        self._body = exploring(self._original, temperature) or self._original
        if not self.capturable or self.why_not_trained() is not None:
            self._body = self._original
        return self._body is not self._original

    def constraints(self) -> dict[str, Any] | None:
        """Return what bends the distribution that the answer is sampled from, or None if nothing does."""
        return constraints_of(self._body.values) if self._for_vllm else None


def lacks_usage(body: Body) -> bool:
    """Return whether a streamed answer would not report its tokens, and may be asked to."""
    options = body.values.get("stream_options")
    if not body.stream or not (options is None or isinstance(options, dict)):
        return False
    return not (options or {}).get("include_usage")


def with_usage(body: Body) -> msgspec.Raw:
    """Return the request's `stream_options`, changed so that the stream reports its tokens."""
    return raw((body.values.get("stream_options") or {}) | {"include_usage": True})


def why_bent(values: Mapping[str, Any]) -> str | None:
    """Return why no step may train on answers to a request with these values, or None if it may.

    The result is `sampling_bent: <field>` with the first field that bars them: one of the class "never", an unknown
    one, or one whose value cannot be read. Without such a field, `greedy` at temperature 0.
    """
    if not _PLAIN.issuperset(values):
        for name, value in values.items():
            if value is not None and name not in _PLAIN and not _is_weighed(name, value):
                return f"{WhyNotTrained.SAMPLING_BENT}: {name[:100]}"
    temperature = values.get("temperature")
    if temperature is not None:
        if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
            return f"{WhyNotTrained.SAMPLING_BENT}: temperature"
        if temperature == 0:
            return WhyNotTrained.GREEDY.value
    return None


def constraints_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what bends the distribution that answers are sampled from, in vLLM's names, or None if nothing does.

    `grammar` is the source of a grammar (`grammar_of`). Values that change nothing are left out. The temperature is not
    among them.
    """
    if _PLAIN.issuperset(values):
        return None
    constraints: dict[str, Any] = {}
    for name, read in _CONSTRAINTS.items():
        if (value := values.get(name)) is not None:
            with suppress(*_UNREADABLE):
                if (constraint := read(value)) is not None:
                    constraints[name] = constraint
    if (grammar := grammar_of(values)) is not None:
        constraints["grammar"] = grammar
    return constraints or None


def grammar_of(values: Mapping[str, Any]) -> str | None:
    """Return the source of the grammar that vLLM applies to the answer, or None if it applies none.

    `tool_choice`: a call is required. `response_format`, `structured_outputs`: the answer's form is given. `tools`:
    calls are free, but once one begins, a grammar constrains it. `thinking_token_budget`: thoughts that reach it are
    ended, as by a grammar that allows one token.
    """
    tools, choice = values.get("tools"), values.get("tool_choice", "auto")
    if tools and (choice == "required" or isinstance(choice, dict)):
        return "tool_choice"
    form = values.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return "response_format"
    if values.get("structured_outputs") is not None:
        return "structured_outputs"
    if tools and choice == "auto" and (values.get("parallel_tool_calls") not in (None, True) or _has_strict(tools)):
        return "tools"
    return None if values.get("thinking_token_budget") in (None, -1) else BUDGET


def _has_strict(tools: Any) -> bool:
    """Return whether one of the tools is marked strict."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict"):
            return True
    return False


def _is_weighed(name: str, value: Any) -> bool:
    """Return whether the trainer can account for this value, or it changes nothing."""
    if (read := _CONSTRAINTS.get(name)) is not None:
        try:
            read(value)
        except _UNREADABLE:
            return False
        return True
    return EFFECTS.get(name) is Effect.WEIGHED or value in _HARMLESS.get(name, ())
