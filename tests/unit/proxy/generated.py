"""Request bodies by hypothesis, over what vLLM's two OpenAI endpoints understand: right ones and wrong ones.

Few tokens and always a seed where tokens are drawn, so that two answers to one request can be compared. Never what
stops the engine (the prompt's logprobs): that has tests of its own.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.unit.proxy.both import MODELS
from tests.unit.proxy.wrong_values import MISSING

Body = dict[str, Any]

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

_ids = st.lists(st.integers(3, 503), min_size=1, max_size=6)
several_prompts = st.lists(texts.filter(bool), min_size=1, max_size=3) | st.lists(_ids, min_size=1, max_size=3)
prompts = texts | _ids | several_prompts

sampled = both(some(temperature=one(1, 0.7, 1.5), seed=seeds), may(top_p=one(1, 0.9), top_k=one(-1, 0, 20)))
choices = some(n=one(2, 3), temperature=one(1), seed=seeds)
greedy_or_seeded = some(temperature=one(0)) | some(temperature=one(1), seed=seeds)
lengths = some(max_tokens=st.integers(1, 8))
_shared: dict[str, SearchStrategy[Body]] = {
    "nothing": st.just({}),
    "sampled": sampled,
    "choices": choices,
    "oddly many choices": both(choices, some(n=one("2", 2.0, True))),
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

CHAT_FEATURES: dict[str, SearchStrategy[Body]] = _shared | {
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
            {"type": "text"}, {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "c", "schema": CELL}},
        ),
        chat_template_kwargs=one({"enable_thinking": False}, {}),
    ),
    "hidden format": some(response_format=one({"type": "json_object"}), include_reasoning=one(False)),
    "hidden text": some(response_format=one({"type": "text"}), include_reasoning=one(False)),
    "hidden logprobs": some(include_reasoning=one(False), logprobs=one(True), return_token_ids=one(True, False)),
    "hidden tool": some(tools=one([MOVE]), tool_choice=one("required", "auto"), include_reasoning=one(False)),
    "completion tokens": some(max_completion_tokens=st.integers(1, 8)),
    "metadata": some(metadata=one({"a": "b"}, {}), store=one(False)),
    "no echo": some(echo=one(False, None)),
    "prompt text": some(return_prompt_text=flags),
    "effort": some(reasoning_effort=one("none", "low")),
    "continued": some(add_generation_prompt=one(False), continue_final_message=one(True, False)),
}  # fmt: skip

"""What a chat may have: each a few fields that belong together."""

TEXT_FEATURES: dict[str, SearchStrategy[Body]] = _shared | {
    "logprobs": some(logprobs=one(None, 0, 1, 5)),
    "echo": some(echo=one(True)),
    "no echo": some(echo=one(False, None)),
    "several prompts": some(prompt=several_prompts),
    "suffix": some(suffix=one("", None)),
    "no max_tokens": some(max_tokens=one(None)),
    "said": some(structured_outputs=texts.filter(bool).map(lambda text: {"choice": [text]})),
}
"""The same of a completion."""

streaming = some(stream=one(True)), may(
    stream_options=one(
        {"include_usage": True}, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": True},
        {"continuous_usage_stats": True}, {}, None,
    )
)  # fmt: skip


@st.composite
def chats(draw: st.DrawFn, feature: str, stream: bool) -> Body:
    """Bodies for `/v1/chat/completions` with one of `CHAT_FEATURES` and perhaps others, which may contradict it."""
    body = both(some(model=one(*MODELS), messages=messages), lengths, greedy_or_seeded)
    return _safe(draw(both(body, _some_of(CHAT_FEATURES), CHAT_FEATURES[feature], *(streaming if stream else ()))))


@st.composite
def completions(draw: st.DrawFn, feature: str, stream: bool) -> Body:
    """The same for `/v1/completions` and `TEXT_FEATURES`."""
    body = both(some(model=one(*MODELS), prompt=prompts), lengths, greedy_or_seeded)
    return _safe(draw(both(body, _some_of(TEXT_FEATURES), TEXT_FEATURES[feature], *(streaming if stream else ()))))


def wrong_chats(field: str, value: Any) -> SearchStrategy[Body]:
    """Bodies for `/v1/chat/completions` with a value that is wrong."""
    return _with(chats("nothing", stream=False) | chats("nothing", stream=True), field, value)


def wrong_completions(field: str, value: Any) -> SearchStrategy[Body]:
    """The same for `/v1/completions`."""
    return _with(completions("nothing", stream=False) | completions("nothing", stream=True), field, value)


def _some_of(features: dict[str, SearchStrategy[Body]]) -> SearchStrategy[Body]:
    names = st.lists(st.sampled_from(sorted(features)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: both(*(features[name] for name in chosen)))


def _with(bodies: SearchStrategy[Body], field: str, value: Any) -> SearchStrategy[Body]:
    return bodies.map(lambda body: _safe(body | {field: value}))


def _safe(body: Body) -> Body:
    """Without what is missing; what would have vLLM compute the prompt's logprobs: a chat's `echo`, and that of a
    completion beside logprobs; and logprobs of beams, of which vLLM tells one by chance."""
    body = {name: value for name, value in body.items() if value is not MISSING}
    left_out = []
    if body.get("echo"):
        left_out.append("echo" if "messages" in body else "logprob")
    if body.get("use_beam_search"):
        left_out += ["logprob", "top_logprobs"]
    return {name: value for name, value in body.items() if not name.startswith(tuple(left_out))}
