"""What answers prove about a server: each outcome of each check, by hand."""

import math
from typing import Any

import pytest

from whetstone.vllm.self_test import checks
from whetstone.vllm.self_test.answers import Answer, Function, ToolCall
from whetstone.vllm.self_test.checks import COOL
from whetstone.vllm.self_test.questions import LOGPROBS, Check

PROMPT, SPOKEN = [1, 10, 2, 1], [470, 3, 2]
TOP = {"token_id:470": -0.5, "token_id:3": -1.5, "token_id:16": -2.5}
PROCESSED = LOGPROBS.answer(True, "processed")


def answer(**changed: Any) -> Answer:
    whole = {
        "prompt_token_ids": PROMPT, "token_ids": SPOKEN, "logprobs": [-0.5, -0.1, -0.2], "top": TOP,
        "prompt_tokens": 4, "completion_tokens": 3, "content": "Hello!", "reasoning": "", "tool_calls": [],
        "finish_reason": "stop",
    }  # fmt: skip
    return Answer(**(whole | changed))


def call(arguments: str = '{"word": "whetstone"}') -> ToolCall:
    return ToolCall("call-1", Function("look_up", arguments))


def token(top: dict[str, float], token_id: int = 470) -> Answer:
    """One token with its alternatives."""
    return answer(token_ids=[token_id], logprobs=[top[f"token_id:{token_id}"]], top=top)


def next_prompt(spoken: list[int]) -> Answer:
    return answer(prompt_token_ids=[*PROMPT, *spoken, 1, 11])


def test_a_whole_answer_can_be_trained_on() -> None:
    check = checks.plain(answer())
    assert (check.ok, check.found) == (True, "4 prompt ids, 3 sampled ids, a logprob for each")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"prompt_token_ids": []}, "no prompt_token_ids"),
        ({"token_ids": []}, "no token_ids"),
        ({"prompt_token_ids": PROMPT[1:]}, "3 and 3 ids where the usage counts 4 and 3 tokens"),
        ({"token_ids": SPOKEN[1:]}, "4 and 2 ids where the usage counts 4 and 3 tokens"),
        ({"logprobs": []}, "3 sampled ids, 0 logprobs"),
        ({"logprobs": [-0.5, math.nan, -0.1]}, "a sampled token's logprob is no number"),
        ({"logprobs": [-0.5, -9999.0, -0.1]}, "a sampled token's logprob is no number"),
    ],
)
def test_an_answer_that_lacks_something_says_what(changed: dict[str, Any], found: str) -> None:
    for check in (
        checks.plain(answer(**changed)),
        checks.streamed(answer(**changed), answer()),
        checks.beside_tools(answer(), answer(**changed)),
        checks.beside_tools(answer(**changed), answer()),
        checks.reasoning(answer(**changed, reasoning="so")),
    ):
        assert (check.ok, check.found) == (False, found)


def test_a_stream_may_be_worded_otherwise_but_not_asked_otherwise() -> None:
    assert checks.streamed(answer(), answer()).found.endswith("the same as plain")
    assert checks.streamed(answer(token_ids=[470, 16, 2]), answer()).ok is True
    assert checks.streamed(answer(prompt_token_ids=[2, 10, 2, 1]), answer()).ok is False


@pytest.mark.parametrize(
    ("auto", "forced", "ok", "found"),
    [
        ({"tool_calls": [call()]}, {}, True, "the model calls look_up of its own choice"),
        ({}, {"tool_calls": [call()]}, True, "the model calls look_up when required to"),
        ({"content": '<tool_call>{"name": "look_up"}'}, {"tool_calls": [call()]}, False, "a call came as plain text"),
        ({}, {"tool_calls": [call('{"word')]}, False, "no JSON object"),
        ({}, {"tool_calls": [call('"word"')]}, False, "no JSON object"),
        ({}, {"tool_calls": [call('{"word')], "finish_reason": "length"}, None, "no whole call within 3 tokens"),
        ({}, {"content": "", "reasoning": "Hello!"}, None, "reasoning only"),
        ({}, {}, False, "no call came"),
    ],
)
def test_a_tool_call_is_proved(auto: dict[str, Any], forced: dict[str, Any], ok: bool | None, found: str) -> None:
    check = checks.tool_call(answer(**auto), answer(**forced), "look_up")
    assert (check.ok, found in check.found) == (ok, True), check.found


@pytest.mark.parametrize(
    ("changed", "ok", "found"),
    [
        ({}, True, "none"),
        ({"reasoning": "so"}, True, "separate"),
        ({"reasoning": "so", "content": "", "tool_calls": [call()]}, True, "separate"),
        ({"reasoning": "so", "content": "", "finish_reason": "length"}, None, "nothing else within 3 tokens"),
        ({"reasoning": "Hello!", "content": ""}, False, "the whole answer is taken for reasoning"),
        ({"content": "<think>so</think>Hello!"}, False, "a part of the content"),
    ],
)
def test_reasoning_is_told_from_the_answer(changed: dict[str, Any], ok: bool | None, found: str) -> None:
    check = checks.reasoning(answer(**changed))
    assert (check.ok, found in check.found) == (ok, True), check.found


@pytest.mark.parametrize(
    ("said", "spoken", "ok", "found"),
    [
        ({}, SPOKEN, True, "answers stay as they were sampled"),
        ({}, [470, 16, 2], False, "earlier answers are rewritten"),
        ({"reasoning": "so"}, [470, 16, 2], False, "reasoning is dropped from earlier answers"),
        ({"finish_reason": "length"}, [470, 16, 2], None, "no end within 3 tokens"),
    ],
)
def test_a_template_keeps_what_was_spoken_or_not(
    said: dict[str, Any], spoken: list[int], ok: bool | None, found: str
) -> None:
    check = checks.template(answer(**said), next_prompt(spoken))
    assert (check.ok, found in check.found) == (ok, True), check.found
    assert check.ok is None or "no tool call to try" in check.found


def test_a_template_must_keep_tool_calls_too() -> None:
    said, called = answer(), answer(tool_calls=[call()])
    assert checks.template(said, next_prompt(SPOKEN), called, next_prompt(SPOKEN)).ok is True
    check = checks.template(said, next_prompt(SPOKEN), called, next_prompt([5]))
    assert (check.ok, check.found) == (False, "answers stay as they were sampled; tool calls are rewritten")


def scaled(top: dict[str, float], factor: float) -> dict[str, float]:
    """Distances between logprobs times `factor`; how they are normalised does not matter."""
    likeliest = max(top.values())
    return {name: likeliest + factor * (logprob - likeliest) for name, logprob in top.items()}


@pytest.mark.parametrize(
    ("cool", "ok", "found"),
    [
        (scaled(TOP, 1 / COOL), True, "processed: at temperature 0.7 logprobs lie 1.43 times as far apart as at 1"),
        (TOP, False, "raw: "),
        (scaled(TOP, 1.2), None, "1.20 times"),
        ({name: logprob + 3 for name, logprob in TOP.items()}, False, "logits, not logprobs"),
        ({"token_id:470": -0.5, "token_id:7": -1}, None, "too few tokens"),
    ],
)
def test_processed_logprobs_are_told_from_raw_ones(cool: dict[str, float], ok: bool | None, found: str) -> None:
    check = checks.logprob_mode(token(TOP), token(cool))
    assert (check.ok, found in check.found) == (ok, True), check.found


def test_tokens_that_cannot_be_sampled_do_not_blur_the_mode() -> None:
    cut = scaled(TOP, 1 / COOL) | {"token_id:7": -9999.0}
    assert checks.logprob_mode(token(TOP | {"token_id:7": -4.0}), token(cut)).ok is True


def test_equally_likely_tokens_do_not_show_the_mode() -> None:
    even = dict.fromkeys(TOP, -1.1)
    assert checks.logprob_mode(token(even), token(even)).ok is None


def test_a_sampled_logprob_unlike_its_alternative_is_found() -> None:
    cool = answer(token_ids=[470], logprobs=[-2.0], top=scaled(TOP, 1 / COOL))
    assert checks.logprob_mode(token(TOP), cool).ok is False


@pytest.mark.parametrize(
    ("unset", "ok", "found"),
    [
        (TOP, True, "unset fields change nothing"),
        ({name: logprob + 0.01 for name, logprob in TOP.items()}, True, "unset fields change nothing"),
        (scaled(TOP, 1.5), False, "unset fields move logprobs by up to 1.00 nats"),
        (TOP | {"token_id:16": -9999.0}, False, "cuts tokens off"),
        (TOP | {f"token_id:{n}": -9.0 for n in range(100, 110)}, True, "unset fields change nothing"),
        ({"token_id:7": -0.5}, False, "unset fields make other tokens likely"),
    ],
)
def test_defaults_of_the_model_are_seen(unset: dict[str, float], ok: bool, found: str) -> None:
    same = answer(top=TOP), answer(top=TOP)
    for pairs in ([(answer(top=unset), answer(top=TOP)), same], [same, (answer(top=unset), answer(top=TOP))]):
        check = checks.defaults(pairs, PROCESSED)
        assert (check.ok, found in check.found) == (ok, True), check.found


def test_one_token_that_is_moved_is_seen_among_many_that_are_not() -> None:
    many = {f"token_id:{n}": -9.0 for n in range(100, 117)} | TOP
    penalised = many | {"token_id:470": -1.1}
    assert checks.defaults([(answer(top=penalised), answer(top=many))], PROCESSED).ok is False


@pytest.mark.parametrize("mode", [LOGPROBS.answer(False, "raw"), LOGPROBS.answer(None, "nobody answered")])
def test_defaults_cannot_be_seen_in_raw_logprobs(mode: Check) -> None:
    assert checks.defaults([(answer(), answer())], mode).ok is None


def test_a_seed_repeats_or_not() -> None:
    assert checks.seeds(answer(), answer()).ok is True
    assert checks.seeds(answer(), answer(token_ids=[470, 16, 2])).ok is False
    assert checks.seeds(answer(token_ids=[]), answer(token_ids=[])).ok is None


@pytest.mark.parametrize(
    ("refusal", "figures", "ok"),
    [
        ("400 Both 'lora_name' and 'lora_path' must be provided.", 'vllm:lora_requests_info{max_lora="6"} 1', True),
        ("400 Both 'lora_name' and 'lora_path' must be provided.", "vllm:num_requests_running 0", False),
        ("400 Both 'lora_name' and 'lora_path' must be provided.", "", None),
        ('vLLM refused /v1/load_lora_adapter: 404 {"detail":"Not Found"}', "vllm:lora_requests_info 1", False),
        ("502 bad gateway", "vllm:lora_requests_info 1", None),
    ],
)
def test_the_refusal_of_an_adapter_and_the_metrics_tell_whether_adapters_are_on(
    refusal: str, figures: str, ok: bool | None
) -> None:
    assert checks.adapters(refusal, figures).ok is ok


def test_what_it_means_follows_from_the_outcome() -> None:
    means = [LOGPROBS.answer(ok, "").means for ok in (True, False, None)]
    assert means == [LOGPROBS.yes, LOGPROBS.no, LOGPROBS.unknown]
