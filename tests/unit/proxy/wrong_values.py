"""Values that vLLM refuses, or reads otherwise than they look, field by field. Knows its two OpenAI endpoints."""

from typing import Any

MISSING = object()
"""In place of a value: the field is left out."""

_WRONG: dict[str, tuple[Any, ...]] = {
    "model": ("nobody", "", "starter@v1", "STARTER", None, 1, [], MISSING),
    "temperature": (-1, "hot", "0.5", 3.5, [], {}, 10**30),
    "top_p": (0, 2, "x", -0.1),
    "top_k": (-5, 1.5, "x"),
    "min_p": (-1, 2),
    "presence_penalty": (3, "x"),
    "frequency_penalty": (-3, []),
    "repetition_penalty": (0, -1, "x"),
    "max_tokens": (-1, 100_000, "x", 1.5, [1]),
    "n": (0, -1, "two", "2", True, 1.5, 2, 100_000),
    "seed": ("x", 2**70, 1.5, -(2**70)),
    "stop": (1, [1], {}, [""], ""),
    "stream": ("maybe", 7, [], "true", 1, 0),
    "stream_options": ({"include_usage": "maybe"}, [], "x", {"include_usage": True}),
    "return_token_ids": ("maybe", "true", 1, 2, []),
    "echo": ("maybe", "true", "false", 1, []),
    "use_beam_search": ("maybe", "true", 1, None),
    "request_id": ("r",),
    "cache_salt": ("s", "", 1),
    "priority": (0, "x"),
    "user": (1, []),
    "logit_bias": ({"x": 1}, {"999999": 1}, [], "x", {"1": "x"}),
    "min_tokens": (-1, 100, "x"),
    "ignore_eos": ("maybe", None),
    "skip_special_tokens": (None, "x"),
    "stop_token_ids": (["x"], "x", None),
    "allowed_token_ids": ([], [999_999], "x"),
    "bad_words": (None, "x", [1]),
    "structured_outputs": ({}, {"choice": []}, {"json": "{"}, {"choice": ["a"], "regex": "b"}, "x", {"regex": "("}),
    "response_format": ({}, {"type": "xml"}, {"type": "json_schema"}, "json", []),
    "stream_interval": (0, "x"),
    "truncate_prompt_tokens": (-2, 10_000, "x"),
}
"""Values that are wrong: of another kind, out of bounds, or at odds with what is usual."""

WRONG_IN_CHATS: dict[str, tuple[Any, ...]] = _WRONG | {
    "messages": (
        MISSING, [], "hi", None, [{}], [{"content": "hi"}], [{"role": "user"}], [{"role": "robot", "content": "hi"}],
        [[]], {"role": "user"}, [{"role": "user", "content": [{"type": "video"}]}], [{"role": "user", "content": 1}],
    ),
    "tools": ("x", [{}], [1], {}, [{"type": "function"}], [{"type": "function", "function": {"name": 1}}]),
    "tool_choice": ("always", "required", {}, {"type": "function", "function": {"name": "no"}}, 1),
    "logprobs": ("maybe", 5, 1, 0, "true", []),
    "top_logprobs": (2, -1, -2, 1000, "two", True, 1.5, [], ""),
    "logprob_token_ids": ([1], ["x"], "x", [999_999]),
    "include_reasoning": (None, "maybe", 0, "false"),
    "max_completion_tokens": (-1, "x", 100_000),
    "chat_template_kwargs": ("x", [], {"tools": 1}, {"add_generation_prompt": False}),
    "parallel_tool_calls": ("maybe",),
    "metadata": (1, "x"),
    "reasoning_effort": ("extreme", 1),
    "continue_final_message": (True, "x"),
    "return_tokens_as_token_ids": ("maybe",),
}  # fmt: skip
WRONG_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = _WRONG | {
    "prompt": (MISSING, None, [], "", [[]], [-1], [999_999], {}, 1, ["a", 1], [[1], "a"], [1.5]),
    "logprobs": (-1, -2, "x", 1000, True, 1.5, []),
    "logprob_token_ids": ([1], "x"),
    "suffix": ("x", 1),
    "return_tokens_as_token_ids": ("maybe",),
}
