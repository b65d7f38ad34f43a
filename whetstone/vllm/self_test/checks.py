"""Evaluate a model server's decoded chat answers: answers in, checks out, without I/O."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from whetstone.vllm.self_test.answers import Answer
from whetstone.vllm.self_test.questions import (
    ADAPTERS,
    CALL,
    DEFAULTS,
    LOGPROBS,
    PLAIN,
    REASONING,
    SEEDS,
    STREAMED,
    TEMPLATE,
    TOOLS,
    Check,
)

MINUS_INFINITY = -9000.0
"""vLLM writes -9999.0 for a token that cannot be sampled; no real logprob comes near."""
NOISE_NATS = 0.1
"""Mean shift of logprobs below which two answers count as equal: batches and bfloat16 move them by less."""
NOISE_OF_ONE_NATS = 0.5
"""The same for a single logprob; a repetition penalty moves those of the prompt's tokens by more."""
LORA_FIGURE = "vllm:lora_requests_info"
"""A metric that vLLM shows only with --enable-lora."""
COOL = 0.7
"""The temperature that distinguishes processed logprobs from raw ones."""


def plain(answer: Answer) -> Check:
    """Check that a plain answer has what training needs."""
    missing = _missing(answer)
    return PLAIN.answer(missing is None, missing or _counted(answer))


def streamed(stream: Answer, plain_answer: Answer) -> Check:
    """Check that a stream has the same as the plain answer to the same greedy request.

    Sampled ids may diverge where two tokens are nearly as likely; their number must still be the usage's.
    """
    if missing := _missing(stream):
        return STREAMED.answer(False, missing)
    if stream.prompt_token_ids != plain_answer.prompt_token_ids:
        return STREAMED.answer(False, "the prompt's ids are not those of the plain answer")
    same = stream.token_ids == plain_answer.token_ids
    return STREAMED.answer(
        True, f"{_counted(stream)}, {'the same as plain' if same else 'worded unlike the plain one'}"
    )


def beside_tools(auto: Answer, forced: Answer) -> Check:
    """Check that ids and logprobs survive the tool parser, with `tool_choice` auto and with a named tool."""
    missing = _missing(auto) or _missing(forced)
    return TOOLS.answer(missing is None, missing or _counted(forced))


def tool_call(auto: Answer, forced: Answer, tool: str) -> Check:
    """Check that a tool call arrives as one: by the model's own choice, or by guided decoding."""
    if not auto.tool_calls and tool in auto.content and "{" in auto.content:
        return CALL.answer(False, "a call came as plain text, unparsed")
    calls = auto.tool_calls or forced.tool_calls
    if calls and _is_object(calls[0].function.arguments):
        how = "of its own choice" if auto.tool_calls else "when required to"
        return CALL.answer(True, f"the model calls {calls[0].function.name} {how}")
    if forced.finish_reason == "length":
        return CALL.answer(None, f"no whole call within {forced.completion_tokens} tokens")
    if calls:
        return CALL.answer(False, f"the call's arguments are no JSON object: {calls[0].function.arguments[:80]!r}")
    if forced.reasoning and not forced.content:
        return CALL.answer(None, "the model was required to call a tool, and answered with reasoning only")
    return CALL.answer(False, "the model was required to call a tool, and no call came")


def reasoning(answer: Answer) -> Check:
    """Check that reasoning is separated from the answer, and counted among the ids."""
    if "<think>" in answer.content or "</think>" in answer.content:
        return REASONING.answer(False, "reasoning is a part of the content")
    if not answer.reasoning:
        return REASONING.answer(True, "none")
    if missing := _missing(answer):
        return REASONING.answer(False, missing)
    if answer.content or answer.tool_calls:
        return REASONING.answer(True, f"separate; the {len(answer.token_ids)} sampled ids cover both")
    if answer.finish_reason == "length":
        return REASONING.answer(None, f"nothing else within {answer.completion_tokens} tokens")
    return REASONING.answer(False, "the whole answer is taken for reasoning")


def template(answer: Answer, next_answer: Answer, call: Answer | None = None, next_call: Answer | None = None) -> Check:
    """Check that the next turn's prompt begins with this turn's ids.

    Args:
        answer: an answer in words.
        next_answer: the answer to the conversation that continues it.
        call: an answer that is a tool call by the model's own choice; None if none came.
        next_call: the answer to the conversation that continues with the tool's result.
    """
    unchanged = _extends(next_answer, answer)
    if not unchanged and answer.finish_reason == "length" and not answer.reasoning:
        return TEMPLATE.answer(None, f"the answer had no end within {answer.completion_tokens} tokens")
    words = "answers stay as they were sampled"
    if not unchanged:
        words = "reasoning is dropped from earlier answers" if answer.reasoning else "earlier answers are rewritten"
    if call is None or next_call is None:
        return TEMPLATE.answer(unchanged, f"{words}; no tool call to try")
    calls_unchanged = _extends(next_call, call)
    calls = "tool calls stay too" if calls_unchanged else "tool calls are rewritten"
    return TEMPLATE.answer(unchanged and calls_unchanged, f"{words}; {calls}")


def logprob_mode(neutral: Answer, cool: Answer) -> Check:
    """Check that logprobs are of the distribution sampled from: at temperature T they lie 1/T times as far apart.

    Args:
        neutral: one token at temperature 1, with its most likely alternatives.
        cool: the same at `COOL`.
    """
    if any(logprob > 1e-3 for logprob in [*neutral.top.values(), *cool.top.values()]):
        return LOGPROBS.answer(False, "logits, not logprobs")
    sampled = cool.top.get(f"token_id:{cool.token_ids[0]}") if cool.token_ids else None
    if sampled is not None and cool.logprobs and abs(sampled - cool.logprobs[0]) > NOISE_NATS:
        return LOGPROBS.answer(False, "the sampled token's logprob is not the one among its alternatives")
    shared = [
        token for token in neutral.top if min(neutral.top[token], cool.top.get(token, -math.inf)) > MINUS_INFINITY
    ]
    apart = _apart(neutral.top, shared)
    if apart < 10 * NOISE_NATS:
        return LOGPROBS.answer(None, "too few tokens that differ in likelihood")
    ratio = _apart(cool.top, shared) / apart
    observed = f"at temperature {COOL} logprobs lie {ratio:.2f} times as far apart as at 1"
    if abs(ratio - 1 / COOL) < 0.1:
        return LOGPROBS.answer(True, f"processed: {observed}")
    if abs(ratio - 1) < 0.1:
        return LOGPROBS.answer(False, f"raw: {observed}")
    return LOGPROBS.answer(None, observed)


def defaults(pairs: Sequence[tuple[Answer, Answer]], mode: Check) -> Check:
    """Check that unset fields are neutral: one token's alternatives are the same as with neutral fields.

    Args:
        pairs: (unset, neutral) answers to otherwise equal requests.
        mode: result of `logprob_mode`; raw logprobs do not show how tokens were sampled.
    """
    if not mode.ok:
        return DEFAULTS.answer(None, "cannot be seen unless logprobs are processed ones")
    if any(logprob < MINUS_INFINITY for unset, _ in pairs for logprob in unset.top.values()):
        return DEFAULTS.answer(False, "unset top_p, top_k or min_p cuts tokens off")
    shifts = [_shifts(unset.top, neutral.top) for unset, neutral in pairs]
    if not all(shifts):
        return DEFAULTS.answer(False, "unset fields make other tokens likely")
    if any(max(shift) > NOISE_OF_ONE_NATS or sum(shift) / len(shift) > NOISE_NATS for shift in shifts):
        return DEFAULTS.answer(False, f"unset fields move logprobs by up to {max(map(max, shifts)):.2f} nats")
    return DEFAULTS.answer(True, "unset fields change nothing")


def seeds(first: Answer, second: Answer) -> Check:
    """Check that the same seed gives the same ids."""
    if not first.token_ids:
        return SEEDS.answer(None, "no ids to compare")
    same = first.token_ids == second.token_ids
    return SEEDS.answer(same, f"the same seed gave {'the same' if same else 'other'} ids")


def adapters(refusal: str, figures: str) -> Check:
    """Check that adapters can be loaded at run time.

    Args:
        refusal: vLLM's error for loading an adapter without a path; the route exists only with
            VLLM_ALLOW_RUNTIME_LORA_UPDATING.
        figures: vLLM's metrics, which count adapters only with --enable-lora.
    """
    if '"detail"' in refusal:
        return ADAPTERS.answer(False, "off: vLLM has no route to load them")
    if "must be provided" not in refusal:
        return ADAPTERS.answer(None, refusal[:200])
    if LORA_FIGURE in figures:
        return ADAPTERS.answer(True, "on")
    if "vllm:" in figures:
        return ADAPTERS.answer(False, "off: the route is there, but vLLM was started without --enable-lora")
    return ADAPTERS.answer(None, "the route is there; without metrics it cannot be seen whether --enable-lora is set")


def _missing(answer: Answer) -> str | None:
    ids, logprobs = answer.token_ids, answer.logprobs
    if not answer.prompt_token_ids or not ids:
        return f"no {'token_ids' if answer.prompt_token_ids else 'prompt_token_ids'}"
    if len(answer.prompt_token_ids) != answer.prompt_tokens or len(ids) != answer.completion_tokens:
        counts = f"{len(answer.prompt_token_ids)} and {len(ids)} ids"
        return f"{counts} where the usage counts {answer.prompt_tokens} and {answer.completion_tokens} tokens"
    if len(logprobs) != len(ids):
        return f"{len(ids)} sampled ids, {len(logprobs)} logprobs"
    if not all(math.isfinite(logprob) and logprob > MINUS_INFINITY for logprob in logprobs):
        return "a sampled token's logprob is no number"
    return None


def _counted(answer: Answer) -> str:
    return f"{len(answer.prompt_token_ids)} prompt ids, {len(answer.token_ids)} sampled ids, a logprob for each"


def _extends(later: Answer, earlier: Answer) -> bool:
    ids = [*earlier.prompt_token_ids, *earlier.token_ids]
    return later.prompt_token_ids[: len(ids)] == ids


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except msgspec.DecodeError:
        return False


def _apart(top: Mapping[str, float], tokens: Sequence[str]) -> float:
    """Return the sum of the distances below the most likely of `tokens`, in nats."""
    return sum(max(top[token] for token in tokens) - top[token] for token in tokens) if tokens else 0.0


def _shifts(top: Mapping[str, float], other: Mapping[str, float]) -> list[float]:
    """Return the distances of the logprobs of the tokens in both, in nats."""
    return [abs(top[token] - other[token]) for token in top.keys() & other.keys()]
