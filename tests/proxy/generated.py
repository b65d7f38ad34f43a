"""Request bodies by hypothesis, over what vLLM's two OpenAI endpoints understand: right ones and wrong ones.

Few tokens and always a seed where tokens are drawn, so that two answers to one request can be compared. Never what
stops the engine (the prompt's logprobs): that has tests of its own.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Body = dict[str, Any]

MODELS = ("starter", "starter@v0")
FRAGMENTS = (
    "hi", " you", "\n", "", "board 4", "é", "e\u0301", "😀", "👩‍👩‍👧", "日本", "\u200d", "ß", "\x00", "\\", '"',
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", '{"a": 1}',
)  # fmt: skip
"""What texts are put together from; the starter's tokenizer cuts all but ASCII into bytes."""

END_OF_THINKING, TOOL_CALL, END_OF_TOOL_CALL = 505, 508, 509
BYTES_OF_AN_EMOJI = (175, 256, 249, 225)
"""Ids of the starter's tokenizer: what its parsers look for, and the bytes of 😀."""

MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Take a cell",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]},
    },
}
SAY = {"type": "function", "function": {"name": "say", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    '<tool_call>\n{"name": "move", "arguments": {"cell": 4}}\n</tool_call>',
    'A 😀\n<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "move", "arguments": {"cell": 1}}\n</tool_call>',
    '<tool_call>\n{"name": "mo',
    "<tool_call> no </tool_call>",
)
"""What a model says that calls tools, and what only looks like it."""

CELL = {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]}


def some(**fields: SearchStrategy[Any]) -> SearchStrategy[Body]:
    """All of these fields."""
    return st.fixed_dictionaries(fields)


def may(**fields: SearchStrategy[Any]) -> SearchStrategy[Body]:
    """Any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def one(*values: Any) -> SearchStrategy[Any]:
    """One of these values."""
    return st.sampled_from(values)


def both(*parts: SearchStrategy[Body]) -> SearchStrategy[Body]:
    """The fields of all; the later win."""
    return st.tuples(*parts).map(lambda bodies: {name: value for body in bodies for name, value in body.items()})


seeds = st.integers(0, 2**31)
flags = one(True, False, None)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=4).map("".join) | st.text(max_size=6)
stops = one("o", "e", " ", "\n", "😀", "é", ",", "re", "are", "tool", "\ufffd")

_parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=2)
_call = {"id": "call-1", "type": "function", "function": {"name": "move", "arguments": '{"cell": 4}'}}
_tool_turn = texts.map(
    lambda text: [
        {"role": "assistant", "content": None, "tool_calls": [_call]},
        {"role": "tool", "tool_call_id": "call-1", "content": text},
    ]
)
_message = some(role=one("user", "assistant", "system"), content=texts) | some(role=one("user"), content=_parts)
_turns = _message.map(lambda message: [message]) | _tool_turn
messages = st.lists(_turns, min_size=1, max_size=3).map(lambda turns: [message for turn in turns for message in turn])

sampled = both(some(temperature=one(1, 0.7, 1.5), seed=seeds), may(top_p=one(1, 0.9), top_k=one(-1, 0, 20)))
choices = some(n=one(2, 3), temperature=one(1), seed=seeds)
shared: dict[str, SearchStrategy[Body]] = {
    "sampled": sampled,
    "choices": choices,
    "stop": both(some(stop=stops | st.lists(stops, max_size=3)), may(include_stop_str_in_output=one(True, False))),
    "tokens that stop": some(stop_token_ids=one([220], [90, 91], [])),
    "kept going": both(some(min_tokens=one(0, 3), ignore_eos=one(True, False)), may(skip_special_tokens=one(False))),
    "bent": may(
        min_p=one(0, 0.05), presence_penalty=one(0, 0.5), frequency_penalty=one(-0.5, 0.5),
        repetition_penalty=one(1, 1.1),
    ),
    "biased": some(logit_bias=one({}, {"90": 5}, {str(BYTES_OF_AN_EMOJI[0]): 100}, {"2": 12})),
    "allowed": some(allowed_token_ids=one(list(BYTES_OF_AN_EMOJI), [90, 2])),
    "ids": some(return_token_ids=flags),
    "tokens as ids": some(return_tokens_as_token_ids=flags),
    "user": some(user=one("u", "", "é")),
    "unknown": some(never_heard_of=one([1], None, {"model": "starter"})),
    "interval": some(stream_interval=one(1, 3)),
    "cut": some(truncate_prompt_tokens=one(-1, 5)),
    "bad words": some(bad_words=one(["o"], [])),
    "beams": some(use_beam_search=one(True), n=one(1, 2), max_tokens=one(3), length_penalty=one(1, 0.5)),
    "repetitions": some(
        repetition_detection=one({"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}), ignore_eos=one(True)
    ),
    "budget": some(thinking_token_budget=one(0, 2, -1)),
    "side": some(truncate_prompt_tokens=one(5), truncation_side=one("left", "right", None)),
    "spaces": may(spaces_between_special_tokens=one(False), add_special_tokens=one(True, False)),
    "session": may(session_id=one("s"), service_tier=one("auto"), return_token_offsets=one(True, False)),
}  # fmt: skip
"""Features of both endpoints: each a few fields that belong together."""

chat_only: dict[str, SearchStrategy[Body]] = {
    "logprobs": some(logprobs=flags),
    "top_logprobs": some(logprobs=one(True), top_logprobs=one(0, 1, 3, None)),
    "zero top_logprobs": some(top_logprobs=one(0, None)),
    "chosen logprobs": some(logprobs=one(True), logprob_token_ids=one([90, 91], [])),
    "hidden": some(include_reasoning=one(False)),
    "shown": some(include_reasoning=one(True)),
    "no thoughts": some(chat_template_kwargs=one({"enable_thinking": False})),
    "thoughts": some(chat_template_kwargs=one({"enable_thinking": True}, {}, None)),
    "thoughts that end": both(
        some(
            logit_bias=one(
                {str(END_OF_THINKING): 7}, {str(END_OF_THINKING): 6, str(TOOL_CALL): 6, str(END_OF_TOOL_CALL): 6}
            ),
            temperature=one(1),
            seed=seeds,
        ),
        may(tools=one([MOVE])),
    ),
    "tools": both(
        some(tools=one([MOVE], [MOVE, SAY], [])),
        may(tool_choice=one("auto", "none", None), parallel_tool_calls=one(True, False)),
    ),
    "forced tool": some(
        tools=one([MOVE], [MOVE, SAY]),
        tool_choice=one("required", {"type": "function", "function": {"name": "move"}}),
        max_tokens=one(8, 24),
    ),
    "called tool": both(
        some(
            tools=one([MOVE, SAY]),
            structured_outputs=st.sampled_from(CALLS).map(lambda call: {"choice": [call]}),
            chat_template_kwargs=one({"enable_thinking": False}),
            max_tokens=one(64),
        ),
        may(parallel_tool_calls=one(True, False), tool_choice=one("auto", "none"), logprobs=one(True)),
    ),
    "said": some(
        structured_outputs=texts.filter(bool).map(lambda text: {"choice": [text]}),
        chat_template_kwargs=one({"enable_thinking": False}),
        max_tokens=one(6, 24),
    ),
    "format": some(
        response_format=one(
            {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "c", "schema": CELL}}
        ),
        chat_template_kwargs=one({"enable_thinking": False}, {}),
    ),
    "format and hidden": some(
        response_format=one({"type": "json_object"}, {"type": "text"}), include_reasoning=one(False, True)
    ),
    "completion tokens": some(max_completion_tokens=st.integers(1, 8)),
    "metadata": some(metadata=one({"a": "b"}, {}), store=one(False)),
    "echo": some(echo=one(True, False), top_logprobs=one(None)),
    "prompt text": some(return_prompt_text=flags),
    "effort": some(reasoning_effort=one("none", "low")),
    "continued": some(add_generation_prompt=one(False), continue_final_message=one(True, False)),
}  # fmt: skip

completion_only: dict[str, SearchStrategy[Body]] = {
    "logprobs": some(logprobs=one(None, 0, 1, 5)),
    "echo": some(echo=one(True, False, None)),
    "suffix": some(suffix=one("", None)),
    "no max_tokens": some(max_tokens=one(None)),
    "said": some(structured_outputs=texts.filter(bool).map(lambda text: {"choice": [text]})),
}

streaming = some(stream=one(True)), may(
    stream_options=one(
        {"include_usage": True}, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": True},
        {"continuous_usage_stats": True}, {}, None,
    )
)  # fmt: skip

_ids = st.lists(st.integers(3, 503), min_size=1, max_size=6)
_some_texts = texts.filter(lambda text: "\x00" not in text)
prompts = texts | _ids | st.lists(texts.filter(bool), min_size=1, max_size=3) | st.lists(_ids, min_size=1, max_size=3)

MISSING = object()
"""In place of a value: the field is left out."""

WRONG: dict[str, tuple[Any, ...]] = {
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

WRONG_CHAT: dict[str, tuple[Any, ...]] = WRONG | {
    "messages": (MISSING, [], "hi", None, [{}], [{"content": "hi"}], [{"role": "user"}], [{"role": "robot", "content": "hi"}],
                 [[]], {"role": "user"}, [{"role": "user", "content": [{"type": "video"}]}], [{"role": "user", "content": 1}]),
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
WRONG_COMPLETION: dict[str, tuple[Any, ...]] = WRONG | {
    "prompt": (MISSING, None, [], "", [[]], [-1], [999_999], {}, 1, ["a", 1], [[1], "a"], [1.5]),
    "logprobs": (-1, -2, "x", 1000, True, 1.5, []),
    "logprob_token_ids": ([1], "x"),
    "suffix": ("x", 1),
    "return_tokens_as_token_ids": ("maybe",),
}


@st.composite
def chats(draw: st.DrawFn, stream: bool) -> Body:
    """Bodies for `/v1/chat/completions` that are right, or nearly: features may contradict one another."""
    body = draw(some(model=one(*MODELS), messages=messages, max_tokens=st.integers(1, 8), temperature=one(0)))
    return _safe(body | _features(draw, shared | chat_only, stream))


@st.composite
def completions(draw: st.DrawFn, stream: bool) -> Body:
    """The same for `/v1/completions`."""
    body = draw(some(model=one(*MODELS), prompt=prompts, max_tokens=st.integers(1, 8), temperature=one(0)))
    return _safe(body | _features(draw, shared | completion_only, stream))


@st.composite
def wrong_chats(draw: st.DrawFn) -> Body:
    """Bodies for `/v1/chat/completions` with one or two fields that are wrong."""
    return _safe(draw(chats(draw(st.booleans()))) | _wrong(draw, WRONG_CHAT))


@st.composite
def wrong_completions(draw: st.DrawFn) -> Body:
    """The same for `/v1/completions`."""
    return _safe(draw(completions(draw(st.booleans()))) | _wrong(draw, WRONG_COMPLETION))


def _features(draw: st.DrawFn, features: dict[str, SearchStrategy[Body]], stream: bool) -> Body:
    names = draw(st.lists(st.sampled_from(sorted(features)), max_size=4, unique=True))
    return draw(both(*(features[name] for name in names), *(streaming if stream else ())))


def _wrong(draw: st.DrawFn, wrong: dict[str, tuple[Any, ...]]) -> Body:
    names = draw(st.lists(st.sampled_from(sorted(wrong)), min_size=1, max_size=2, unique=True))
    return {name: draw(st.sampled_from(wrong[name])) for name in names}


def _safe(body: Body) -> Body:
    """Without what is missing, and what would have vLLM compute the prompt's logprobs: `echo` beside any kind of
    them, chat's default too."""
    body = {name: value for name, value in body.items() if value is not MISSING}
    if not body.get("echo"):
        return body
    kept = {name: value for name, value in body.items() if not name.startswith(("logprob", "top_logprobs"))}
    return kept | {"top_logprobs": None} if "messages" in body else kept
