"""The three classes of parameters before the real vLLM: neutral fields change no token and no logprob, grammars do."""

from typing import Any

import httpx
import pytest

from proxy.wire.parameters import EFFECTS, Effect, constraints_of, grammar_of

pytestmark = pytest.mark.stack

TOOL_CALL, THOUGHT = "<tool_call>", "<think>"
MOVE: dict[str, Any] = {
    "name": "move",
    "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]},
}
LOOSE = [{"type": "function", "function": MOVE}]
STRICT = [{"type": "function", "function": MOVE | {"strict": True}}]
NEUTRAL: dict[str, Any] = {
    "service_tier": "auto", "store": True, "user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "24h", "safety_identifier": "s",
    "verbosity": "low", "modalities": ["text"], "audio": {"voice": "ash", "format": "wav"},
    "prediction": {"type": "content", "content": "x"}, "moderation": {"model": "m"}, "web_search_options": {},
    "function_call": "auto", "functions": [{"name": "f"}], "best_of": 1, "session_id": "s", "length_penalty": 2.0,
    "stop_token_ids": [9], "stop": "never said", "ignore_eos": True, "max_completion_tokens": 8,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 99}, "truncate_prompt_tokens": 100,
    "truncation_side": "left", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1},
    "documents": [{"title": "t", "text": "x"}], "add_generation_prompt": True, "add_special_tokens": False,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "include_stop_str_in_output": True,
    "logprob_token_ids": [1, 2], "return_tokens_as_token_ids": True, "return_prompt_text": True,
    "return_token_offsets": True, "stream_interval": 2, "parallel_tool_calls": False, "tool_choice": "none",
    "response_format": {"type": "text"}, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0,
    "thinking_token_budget": -1, "bad_words": [], "watermarking": False,
}  # fmt: skip


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(url + path, json={"model": "starter@v0"} | body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def sampled(url: str, **values: Any) -> list[tuple[int, float]]:
    """The tokens of an answer with their logprobs."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 5}
    body = post(url, "/v1/chat/completions", **fields | {"logprobs": True, "return_token_ids": True} | values)
    (choice,) = body["choices"]
    logprobs = [round(one["logprob"], 3) for one in choice["logprobs"]["content"]]
    return list(zip(choice["token_ids"], logprobs, strict=True))


def towards(url: str, word: str) -> dict[str, float]:
    """A bias that lets nothing but this word be sampled, unless something forbids it."""
    (token_id,) = post(url, "/tokenize", prompt=word, add_special_tokens=False)["tokens"]
    return {str(token_id): 80.0}


def test_what_the_table_calls_neutral_changes_no_token_and_no_logprob(parsing_vllm_url: str) -> None:
    assert constraints_of(NEUTRAL) is None
    assert sum(EFFECTS[name] is Effect.NEUTRAL for name in NEUTRAL) > 35
    assert sampled(parsing_vllm_url, **NEUTRAL) == sampled(parsing_vllm_url)


@pytest.mark.parametrize(
    "values",
    [
        {"tools": LOOSE},
        {"tools": LOOSE, "parallel_tool_calls": False},
        {"tools": STRICT},
        {"tools": STRICT, "tool_choice": None},
        {"tools": STRICT, "tool_choice": "none"},
        {"tools": LOOSE, "tool_choice": "required"},
        {"tools": LOOSE, "tool_choice": {"type": "function", "function": {"name": "move"}}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_there_is_a_grammar_where_the_table_says_so_and_nowhere_else(
    parsing_vllm_url: str, values: dict[str, Any]
) -> None:
    # One call after the other, without end, is what no grammar allows.
    bias = towards(parsing_vllm_url, TOOL_CALL)
    # Without thoughts, which a grammar would leave free.
    brief = {"chat_template_kwargs": {"enable_thinking": False}, "logit_bias": bias}
    token_ids = [token_id for token_id, _ in sampled(parsing_vllm_url, **brief, **values)]
    repeated = [int(token_id) for token_id in bias] * 8
    assert (token_ids != repeated) == (grammar_of(values) is not None)


def test_a_budget_for_thoughts_acts_as_a_grammar_of_one_token(parsing_vllm_url: str) -> None:
    bias = towards(parsing_vllm_url, THOUGHT)
    free = sampled(parsing_vllm_url, logit_bias=bias)
    bound = sampled(parsing_vllm_url, logit_bias=bias, thinking_token_budget=2)
    assert {token_id for token_id, _ in free} == {int(token_id) for token_id in bias}
    forced = [logprob for (token_id, logprob), other in zip(bound, free, strict=True) if token_id != other[0]]
    assert forced, "the budget ends them"
    assert set(forced) == {0.0}, "for certain: the trainer sees what it decided"
