"""Responses requests translated to chat, beside the real vLLM's own /v1/responses: prompt, sampling, answer are equal.

Ids and times may differ, and where a stream is cut into pieces: vLLM itself cuts it by how busy it is.
"""

import json
import math
import re
from random import Random
from typing import Any

import httpx
import openai
import pytest

from proxy.wire.responses.request import chat_of
from tests.sharing import every_second
from tests.unit.proxy.both import ATTEMPTS
from tests.unit.proxy.conftest import RunningProxy, wait_for
from tests.unit.proxy.wire.responses.test_bodies import BODIES, CLIENTS

pytestmark = pytest.mark.stack

MODEL = "starter@v0"
MOVE: dict[str, Any] = {
    "type": "function",
    "name": "move",
    "description": "Take a cell",
    "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]},
}
PASS: dict[str, Any] = {"type": "function", "name": "pass_on", "parameters": None, "strict": None}
SEARCH: dict[str, Any] = {
    "type": "web_search",
    "external_web_access": False,
    "filters": {"allowed_domains": ["example.org"]},
    "user_location": {"type": "approximate", "country": "DE"},
}
NOTES: dict[str, Any] = {
    "type": "namespace",
    "name": "notes",
    "description": "Notes of the game",
    "tools": [MOVE | {"name": "add", "strict": False}, {"type": "custom", "name": "raw", "format": {"type": "text"}}],
}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "move"}]}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "text"},
}
SERVER_TOOLS = [
    SEARCH,
    {"type": "web_search_preview", "search_context_size": "low", "user_location": {"type": "approximate"}},
    {"type": "file_search", "vector_store_ids": ["v"], "filters": {"key": "a", "type": "eq", "value": "b"},
     "ranking_options": {"ranker": "auto", "score_threshold": 0.5}},
    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": [], "network_policy": {"type": "disabled"}}},
    {"type": "computer"},
    {"type": "computer_use_preview", "display_height": 2, "display_width": 1, "environment": "browser"},
    {"type": "image_generation", "quality": "low", "input_image_mask": {"file_id": "f"}, "output_compression": 50},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "container_reference", "container_id": "c"}},
    {"type": "mcp", "server_label": "docs", "server_url": "https://example.org", "allowed_tools": {"tool_names": ["a"]},
     "require_approval": {"never": {"tool_names": ["a"]}}, "headers": {"a": "b"}},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
    {"type": "apply_patch"},
    {"type": "programmatic_tool_calling"},
]  # fmt: skip
CITATION = {"type": "url_citation", "url": "https://example.org", "title": "a", "start_index": 0, "end_index": 1}
LOGPROB = {"token": "b", "bytes": [98], "logprob": -0.5, "top_logprobs": []}
SCHEMA = {"type": "object", "properties": {"cell": {"type": "integer", "maximum": 8}}, "required": ["cell"]}
FORMAT = {"format": {"type": "json_schema", "name": "cell", "schema": SCHEMA}}
SHORTCUTS = (85,)
"""Seeds that brought thoughts, a call and a text with vLLM 0.32.0; another version may need others."""
BRIEF = {"reasoning": {"effort": "none"}}
"""No thoughts: the starter model then calls tools and writes JSON where it must."""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(call_id: str, cell: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "move", "arguments": json.dumps({"cell": cell})}


def returned(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def answered(text: str, **values: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]} | values


def thought(text: str, **values: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]} | values


TOOL_TURN = [
    user("Play!"),
    thought("The middle."),
    called("c1", 4),
    called("c2", 0),
    returned("c1", "X"),
    returned("c2", "O"),
]
REPLAYED = [
    user("Play!"),
    thought("The middle.", id="rs_1", encrypted_content=None, status=None),
    answered("I take it.", id="msg_1", status="completed", phase=None),
    {"id": "fc_1", "status": "completed", "async": None, "caller": None, "namespace": None} | called("c1", 4),
    {"id": "o_1", "status": "completed"} | returned("c1", "X"),
]
"""An answer's items as the openai package sends them back."""

CAPTURED: dict[str, dict[str, Any]] = {
    "arguments that are no JSON": {"input": [user("a"), called("c1", 1) | {"arguments": "{"}, returned("c1", "b")]},
    "a text": {},
    "an empty text": {"input": ""},
    "unicode": {"input": 'Grüße, 世界 🙂 \u0000\u2028 "quoted" \\ <|im_end|>'},
    "instructions": {"instructions": "You play tic-tac-toe."},
    "unicode echoed": {"instructions": 'Grüße \u2028 \x01 \x7f </b> 🙂 "\\/', "metadata": {"ß": "\t界"}},
    "empty instructions": {"instructions": ""},
    "one item": {"input": [user("Hello there!")]},
    "parts": {"input": [user([{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "there!"}])]},
    "system and developer": {
        "input": [{"role": "system", "content": "Be brief."}, user("a"), {"role": "developer", "content": "b"}]
    },
    "instructions and system": {"instructions": "One.", "input": [{"role": "system", "content": "Two."}, user("a")]},
    "several turns": {"input": [user("Hello"), {"role": "assistant", "content": "Hi!"}, user("there")]},
    "an answer last": {"input": [user("Hello"), {"role": "assistant", "content": "Hi!"}]},
    "two answers": {
        "input": [user("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}, user("d")]
    },
    "answer items": {"input": [user("Hello"), answered("Hi!"), user("there")]},
    "an answer of two parts": {
        "input": [user("a"), answered("", content=[{"type": "output_text", "text": t} for t in "bc"]), user("d")]
    },
    "thoughts before an answer": {"input": [user("a"), thought("b"), answered("c"), user("d")]},
    "thoughts after an answer": {"input": [user("a"), answered("b"), thought("c"), user("d")]},
    "a summary": {
        "input": [user("a"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b"}]}, user("c")]
    },
    "thoughts twice": {"input": [user("a"), thought("b"), thought("c"), user("d")]},
    "empty thoughts": {"input": [user("a"), {"type": "reasoning", "summary": []}, answered("b"), user("c")]},
    "an answer as the client sends it back": {"input": REPLAYED, "tools": [MOVE]},
    "tool results": {"input": TOOL_TURN, "tools": [MOVE]},
    "a call after an answer": {
        "input": [user("a"), answered("b"), called("c1", 1), returned("c1", "c")],
        "tools": [MOVE],
    },
    "tool results without tools": {"input": TOOL_TURN},
    "two tools": {"tools": [MOVE, PASS]},
    "a strict tool": {"tools": [MOVE | {"strict": True}], **BRIEF},
    "a tool that is not strict": {"tools": [MOVE | {"strict": False}], **BRIEF},
    "no tool to be called": {"tools": [MOVE], "tool_choice": "none", "text": {"format": {"type": "text"}}},
    "a tool must be called": {"tools": [MOVE, PASS], "tool_choice": "required", "max_output_tokens": 60},
    "a tool must be called at once": {
        "tools": [MOVE | {"strict": True}, PASS],
        "tool_choice": "required",
        "max_output_tokens": 60,
        **BRIEF,
    },
    "this tool": {"tools": [MOVE, PASS], "tool_choice": {"type": "function", "name": "move"}, "max_output_tokens": 60},
    "this tool at once": {
        "tools": [MOVE | {"strict": True}],
        "tool_choice": {"type": "function", "name": "move"},
        "max_output_tokens": 60,
        **BRIEF,
    },
    "one call": {
        "tools": [MOVE | {"strict": True}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 90,
        **BRIEF,
    },
    "one call if any": {"tools": [MOVE], "parallel_tool_calls": False},
    "effort": {"reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 30},
    "no effort": BRIEF,
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "text": {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    "empty text settings": {"text": {}},
    "a schema": {"text": FORMAT, "max_output_tokens": 40, **BRIEF},
    "a schema after thoughts": {"text": FORMAT, "max_output_tokens": 40},
    "a strict schema": {"text": {"format": FORMAT["format"] | {"strict": True, "description": "where"}}, **BRIEF},
    "any JSON": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 20, **BRIEF},
    "one token": {"max_output_tokens": 1},
    "no limit": {"max_output_tokens": None},
    "more than there is room for": {"max_output_tokens": 2045},
    "sampled by seed": {"temperature": 1, "seed": 7},
    "by default": {"temperature": None, "seed": 7},
    "hot and cut": {"temperature": 1.5, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "nearly greedy": {"temperature": 0.001, "top_p": 0.5, "seed": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
    "stop": {"stop": ["o ", "e"], "max_output_tokens": 24},
    "ids on messages": {
        "input": [
            {
                "type": "message",
                "id": "msg_u",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {"type": "message", "id": "msg_v", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        ]
    },
    "statuses on messages": {
        "input": [user([{"type": "input_text", "text": t}]) | {"status": "completed", "id": t} for t in "ab"]
    },
    "a phase": {"input": [user("a"), answered("b", phase="final_answer"), user("c")]},
    "no parts": {"input": [user([]), user("a")]},
    "a refusal after a text": {
        "input": [
            user("a"),
            answered("", content=[{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]),
            user("d"),
        ]
    },
    "annotations and logprobs sent back": {
        "input": [
            user("a"),
            answered(
                "", content=[{"type": "output_text", "text": "b", "annotations": [CITATION], "logprobs": [LOGPROB]}]
            ),
            user("c"),
        ]
    },
    "an answer of input parts": {
        "input": [user("a"), {"role": "assistant", "content": [{"type": "input_text", "text": "b"}]}, user("c")]
    },
    "a list as output": {
        "input": [user("Play!"), called("c1", 4), returned("c1", [{"type": "input_text", "text": t} for t in "XY"])],
        "tools": [MOVE],
    },
    "names and callers": {
        "input": [
            user("Play!"),
            called("c1", 4) | {"caller": {"type": "direct"}, "created_by": "me"},
            returned("c1", "X") | {"id": "o", "status": "completed", "name": "move", "caller": {"type": "direct"}},
        ],
        "tools": [MOVE],
    },
    "a half answer to go on with": {
        "input": [user("Hello"), answered("Hi the", id="m", status="incomplete")],
        "max_output_tokens": 6,
        **BRIEF,
    },
    "a half answer before others": {
        "input": [user("Hello"), answered("Hi the", id="m", status="incomplete"), user("Go on!")]
    },
    "a tool of the server": {"tools": [{"type": "web_search_preview"}]},
    "a tool of the server beside others": {"tools": [SEARCH, MOVE], **BRIEF},
    "no tool of the server to be called": {"tools": [SEARCH], "tool_choice": "none"},
    "every tool of the server": {"tools": SERVER_TOOLS, "max_output_tokens": 4},
    "a namespace": {"tools": [NOTES, MOVE], **BRIEF},
    "a tool in a namespace": {
        "tools": [NOTES, MOVE],
        "tool_choice": {"type": "function", "name": "add"},
        "max_output_tokens": 40,
        **BRIEF,
    },
    "a call in a namespace": {
        "input": [user("a"), called("c1", 1) | {"name": "add", "namespace": "notes"}, returned("c1", "b")],
        "tools": [NOTES],
        "tool_choice": "required",
        "max_output_tokens": 40,
        **BRIEF,
    },
    "a custom tool": {"tools": [PATCH, MOVE], **BRIEF},
    "a custom tool at once": {
        "tools": [PATCH],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": 40,
        **BRIEF,
    },
    "a custom tool must be called": {"tools": [PATCH], "tool_choice": "required", "max_output_tokens": 60, **BRIEF},
    "a call of a custom tool": {
        "input": [
            user("a"),
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": '*** Begin\n"é"'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "apply_patch", "input": ""},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        ],
        "tools": [PATCH],
    },
    "tools that say more": {
        "tools": [
            MOVE
            | {"output_schema": {"type": "string"}, "allowed_callers": ["direct"], "defer_loading": False, "more": 1}
        ]
    },
    "a strict tool in a namespace": {
        "tools": [NOTES | {"tools": [MOVE | {"name": "add", "strict": True}]}],
        "tool_choice": "required",
        "max_output_tokens": 60,
        **BRIEF,
    },
    "allowed tools": {"tools": [MOVE, PASS], "tool_choice": ALLOWED, "max_output_tokens": 60, **BRIEF},
    "allowed tools that are strict": {
        "tools": [MOVE | {"strict": True}, SEARCH],
        "tool_choice": ALLOWED | {"mode": "required"},
        "text": {"verbosity": "low"},
        "max_output_tokens": 60,
        **BRIEF,
    },
    "allowed tools and a schema": {"tools": [MOVE], "tool_choice": ALLOWED, "text": FORMAT, **BRIEF},
    "a tool of the server at once": {"tools": [SEARCH], "tool_choice": {"type": "web_search_preview"}},
    "a tool of the server at once beside others": {
        "tools": [MOVE, {"type": "mcp", "server_label": "docs", "server_url": "https://example.org"}],
        "tool_choice": {"type": "mcp", "server_label": "docs"},
        **BRIEF,
    },
    "text beside tools": {"tools": [MOVE], "text": {"format": {"type": "text"}, "verbosity": "low"}},
    "text beside a strict tool": {"tools": [MOVE | {"strict": True}], "text": {"verbosity": "low"}, **BRIEF},
    "a schema beside tools": {"tools": [MOVE], "text": FORMAT, "max_output_tokens": 40, **BRIEF},
    "a schema beside a strict tool": {
        "tools": [MOVE | {"strict": True}],
        "text": FORMAT,
        "max_output_tokens": 40,
        **BRIEF,
    },
    "a schema beside a tool that must be called": {
        "tools": [MOVE],
        "text": FORMAT,
        "tool_choice": "required",
        "max_output_tokens": 40,
        **BRIEF,
    },
    "a schema beside one call": {
        "tools": [MOVE],
        "text": FORMAT,
        "parallel_tool_calls": False,
        "max_output_tokens": 40,
        **BRIEF,
    },
    "text beside one call": {"tools": [MOVE], "text": {"verbosity": "high"}, "parallel_tool_calls": False},
    "text beside a tool of the server": {"tools": [SEARCH], "text": FORMAT, "max_output_tokens": 40, **BRIEF},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "input": "Hello", **BRIEF},
    "logprobs without others": {"include": ["message.output_text.logprobs"], **BRIEF},
    "logprobs of thoughts": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "no reasoning": {"include_reasoning": False},
    "no reasoning before a schema": {"include_reasoning": False, "text": FORMAT, "max_output_tokens": 40},
    "cut where it is too long": {"input": "hi " * 3000, "truncation": "auto", "max_output_tokens": 5},
    "truncation where there is room": {"truncation": "auto"},
    "an unknown field": {"unknown_field": 1},
    "structured outputs": {"structured_outputs": {"regex": "[a-c]{3}"}, **BRIEF},
    "structured outputs beside one call": {
        "structured_outputs": {"choice": ["yes", "no"]},
        "tools": [MOVE],
        "parallel_tool_calls": False,
        "text": {},
        **BRIEF,
    },
    "a bias": {"logit_bias": {"5": 3, "7": -100}},
    "more of vLLM's sampling": {
        "stop_token_ids": [5, 6],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stop": ["e"],
    },
    "what vLLM ignores": {
        "conversation": "conv_1",
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "moderation": {"model": "omni-moderation-latest"},
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "client_metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
    },
    "what is only echoed": {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "max_tool_calls": 2,
        "store": True,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "top_logprobs": 3,
    },
}
"""What is translated, and answered 200."""

REFUSED: dict[str, dict[str, Any]] = {
    "more tokens than the model has": {"max_output_tokens": 100_000},
    "too long": {"input": "hi " * 3000},
    "too long with a limit": {"input": "hi " * 3000, "max_output_tokens": 5},
    "cut to no room": {"input": "hi " * 3000, "truncation": "auto", "max_output_tokens": None},
}
"""What is translated, and refused by vLLM before it speaks."""

AS_IT_CAME: dict[str, dict[str, Any]] = {
    "no input": {"input": []},
    "cold": {"temperature": -1},
    "a number as text": {"temperature": "0.5"},
    "a tool that was not given": {"tools": [MOVE], "tool_choice": {"type": "function", "name": "nothing"}},
    "a tool without tools": {"tool_choice": "required"},
    "only a tool of the server where one must be called": {"tools": [SEARCH], "tool_choice": "required"},
    "one call if any without a function": {"tools": [SEARCH], "parallel_tool_calls": False},
    "a grammar for a custom tool": {
        "tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}}]
    },
    "a tool never heard of": {"tools": [{"type": "teleport"}]},
    "in the background": {"background": True},
    "half a thought": {"input": [user("a"), thought("b", status="incomplete")]},
    "a file": {
        "input": [user([{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,YQ=="}])]
    },
    "a search of before": {"input": [user("a"), {"type": "web_search_call", "id": "ws_1", "status": "completed"}]},
    "encrypted thoughts": {"input": [user("a"), thought("b", encrypted_content="x")]},
    "a field of chat": {"max_tokens": 5},
    "messages in the answer": {"enable_response_messages": True},
    "items that are none": {"input": [5]},
}
"""What is not translated: vLLM's own route answers it."""


NO_TYPE = {"text": {"format": FORMAT["format"] | {"schema": {"type": "strange"}}}}
"""What vLLM refuses late: within a stream."""

DIFFERS = ("id", "item_id", "call_id", "created_at", "model", "cached_tokens", "cache_write_tokens")
_DIFFERING = re.compile(rf'"({"|".join(DIFFERS)})":("(?:[^"\\\\]|\\\\.)*"|\d+)')


@pytest.fixture(scope="module")
def vllm_url(parsing_vllm_url: str) -> str:
    """With parsers for thoughts and tools."""
    return parsing_vllm_url


@pytest.fixture(scope="module")
def max_model_len(direct: httpx.Client) -> int:
    return int(direct.get("/v1/models").json()["data"][0]["max_model_len"])


def request_of(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    request = {"model": MODEL, "input": "Hello there!", "max_output_tokens": 12, "temperature": 0} | values | more
    return {name: value for name, value in request.items() if value is not None}


def hidden(value: Any) -> Any:
    """Without what may differ: ids, times, the model's name, and how much was cached already."""
    if isinstance(value, dict):
        return {name: hidden(item) for name, item in value.items() if name not in DIFFERS}
    return [hidden(item) for item in value] if isinstance(value, list) else value


def keys_of(value: Any) -> Any:
    """Every key, in order."""
    if isinstance(value, dict):
        return [(name, keys_of(item)) for name, item in value.items()]
    return [keys_of(item) for item in value] if isinstance(value, list) else None


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is framed as vLLM frames it, and they are numbered."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    parsed = []
    for event in events:
        match = re.fullmatch(r"event: (\S+)\ndata: ({.*})", event)
        assert match, event
        parsed.append(json.loads(match[2]))
        assert parsed[-1]["type"] == match[1]
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without their numbers, pieces of the same put together."""
    whole: list[dict[str, Any]] = []
    for event in events:
        if event["type"].endswith(".delta") and whole and whole[-1]["type"] == event["type"]:
            whole[-1]["delta"] += event["delta"]
        else:
            whole.append({name: value for name, value in event.items() if name != "sequence_number"})
    return whole


def compared(response: httpx.Response) -> Any:
    """What must be equal: of a whole answer every byte, of a stream every event, with the order of its keys."""
    kind = response.headers["content-type"]
    if kind.startswith("text/event-stream"):
        events = joined(events_of(response.text))
        return response.status_code, kind, hidden(events), [keys_of(event) for event in events]
    return response.status_code, kind, _DIFFERING.sub(r'"\1":…', response.text)


def ask_both(real: RunningProxy, direct: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    """Ask the proxy, and vLLM alone; the answers are equal."""
    for _ in range(ATTEMPTS):
        response = real.client.post("/v1/responses", json=request | {"model": "starter"})
        alone = direct.post("/v1/responses", json=request)
        # Of two tokens that are nearly as likely, a batch decides.
        if compared(response) == compared(alone):
            break
    assert compared(response) == compared(alone)
    return response


def check_record(real: RunningProxy, direct: httpx.Client, response: httpx.Response, request: dict[str, Any]) -> Any:
    """It is recorded with the ids of the prompt, as vLLM itself makes it of this request, and of the whole answer."""
    (row,) = wait_for(lambda: real.rows(call_id=response.headers["x-completion-id"]))
    assert (row.endpoint, row.status, row.streamed) == ("responses", "complete", bool(request.get("stream")))
    body = {name: value for name, value in request.items() if name != "stream"} | {"enable_response_messages": True}
    (prompt,) = direct.post("/v1/responses", json=body).json()["input_messages"]
    assert row.prompt_token_ids == prompt["tokens"]
    assert len(row.token_ids) == len(row.inference_logprobs) == row.completion_tokens > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.inference_logprobs)
    return row


def rendered(direct: httpx.Client, request: dict[str, Any], max_model_len: int) -> list[dict[str, Any]]:
    """What vLLM makes of the request, and of the chat that stands for it."""
    parts = ("token_ids", "sampling_params", "reasoning_parser_kwargs")
    chat = chat_of(request, max_model_len)
    assert chat is not None, request
    # Only Responses' own route takes the logprobs away again.
    chat = {name: value for name, value in chat.items() if name not in ("logprobs", "top_logprobs")}
    made = [
        direct.post(f"/v1/{route}/render", json=body)
        for route, body in (("responses", request | {"include": []}), ("chat/completions", chat))
    ]
    for response in made:
        assert response.status_code == 200, (response.text, request)
    bodies: list[dict[str, Any]] = [{part: response.json()[part] for part in parts} for response in made]
    # Written where there are none, and for the template only.
    bodies[0]["sampling_params"].pop("extra_args")
    bodies[1]["reasoning_parser_kwargs"]["chat_template_kwargs"].pop("tools", None)
    return bodies


def conversation(random: Random) -> dict[str, Any]:
    """A request as agents send it, made of every kind of item and tool in any order that makes sense."""

    def words() -> str:
        return " ".join(
            random.choices(["Play", "the", "middle", "é", "🙂", "", '"', "\n", "\\"], k=random.randint(1, 5))
        )

    def parts(kind: str) -> Any:
        listed = [{"type": kind, "text": words()} for _ in range(random.randint(1, 3))]
        return random.choice([words(), listed])

    def turn() -> list[dict[str, Any]]:
        call_id = f"c{random.randrange(10**6)}"
        call = {"type": "function_call", "call_id": call_id, "name": "move", "arguments": json.dumps({"cell": 1})}
        custom = {"type": "custom_tool_call", "call_id": call_id, "name": "apply_patch", "input": words()}
        result = {"call_id": call_id, "output": parts("input_text")}
        answer = random.choice(
            [
                {"role": "assistant", "content": words()},
                answered(words(), id=f"msg_{call_id}", phase=random.choice(["commentary", None])),
                answered(words()) | {"content": [{"type": "output_text", "text": words(), "annotations": []}] * 2},
            ]
        )
        calls = random.choice(
            [
                [],
                [call, {"type": "function_call_output", "id": "o", "status": "completed"} | result],
                [call | {"namespace": "notes", "name": "add"}, {"type": "function_call_output"} | result],
                [custom, {"type": "custom_tool_call_output"} | result],
                [call | {"id": "fc", "status": "completed"}, {"type": "function_call_output"} | result],
            ]
        )
        thoughts = random.choice([[], [thought(words())], [{"type": "reasoning", "id": "r", "summary": []}]])
        extra = random.choice([{}, {"type": "message"}, {"id": "u", "type": "message", "status": "completed"}])
        role = random.choice(["user", "user", "developer"])
        return [extra | {"role": role, "content": parts("input_text")}, *thoughts, answer, *calls]

    tools = random.sample(
        [MOVE, PASS, SEARCH, NOTES, PATCH, MOVE | {"name": "strict", "strict": True}], random.randint(0, 4)
    )
    request: dict[str, Any] = {"input": [item for _ in range(random.randint(1, 3)) for item in turn()] + [user("Go!")]}
    if tools:
        request["tools"] = tools
    if random.random() < 0.4:
        request["instructions"] = words()
    if random.random() < 0.3:
        request["text"] = random.choice([FORMAT, {"verbosity": "low"}, {"format": {"type": "json_object"}}])
    if random.random() < 0.3:
        request["reasoning"] = {"effort": random.choice(["none", "low", "high"]), "summary": "auto"}
    if MOVE in tools and random.random() < 0.6:
        request["tool_choice"] = random.choice(["auto", "none", "required", {"type": "function", "name": "move"}])
        request["parallel_tool_calls"] = random.random() < 0.5
    return request


@pytest.mark.parametrize("name", CAPTURED)
def test_prompt_and_sampling_are_those_of_vllm_alone(direct: httpx.Client, max_model_len: int, name: str) -> None:
    alone, translated = rendered(direct, request_of(CAPTURED[name]), max_model_len)
    assert alone == translated
    assert len(alone["token_ids"]) > 0


@pytest.mark.parametrize("name", CLIENTS)
def test_prompt_of_a_client_is_that_of_vllm_alone(direct: httpx.Client, max_model_len: int, name: str) -> None:
    """As far as it fits: the starter model is short."""
    fitting = {"model": MODEL, "truncation": "auto", "max_output_tokens": 5}
    alone, translated = rendered(direct, json.loads(BODIES[name]) | fitting, max_model_len)
    assert alone == translated


@pytest.mark.parametrize("seed", range(4))
def test_prompt_and_sampling_of_any_conversation_are_those_of_vllm_alone(
    direct: httpx.Client, max_model_len: int, seed: int
) -> None:
    random = Random(seed)
    for _ in range(25):
        alone, translated = rendered(direct, request_of(conversation(random)), max_model_len)
        assert alone == translated


@pytest.mark.parametrize("name", every_second(CAPTURED, "exact"))  # as a stream each of them is asked
def test_a_plain_answer_is_that_of_vllm_alone(real: RunningProxy, direct: httpx.Client, name: str) -> None:
    request = request_of(CAPTURED[name])
    response = ask_both(real, direct, request)
    assert response.status_code == 200
    body = response.json()
    row = check_record(real, direct, response, request)
    assert body["model"] == "starter"
    assert body["id"] == row.upstream_id
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (row.prompt_tokens, row.completion_tokens)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_stream_is_that_of_vllm_alone(real: RunningProxy, direct: httpx.Client, name: str) -> None:
    request = request_of(CAPTURED[name], stream=True)
    response = ask_both(real, direct, request)
    first, *_, last = events_of(response.text)
    assert (first["type"], last["type"]) == ("response.created", "response.completed")
    row = check_record(real, direct, response, request)
    assert first["response"]["id"] == last["response"]["id"] == row.upstream_id
    assert first["response"]["model"] == "starter"
    assert last["response"]["usage"]["output_tokens"] == row.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_text_and_calls_in_one_answer(real: RunningProxy, direct: httpx.Client, stream: bool) -> None:
    """Hot, and with a bias, the starter model ends its thoughts; a strict tool makes the call it begins a right one."""
    end = {"model": MODEL, "prompt": "</think>", "add_special_tokens": False}
    (end_id,) = direct.post("/tokenize", json=end).json()["tokens"]
    values = {"input": "Hello", "temperature": 2, "max_output_tokens": 120, "tools": [MOVE | {"strict": True}]}
    kinds: set[str] = set()
    for seed in (*SHORTCUTS, *range(100)):
        request = request_of(values, seed=seed, stream=stream, logit_bias={str(end_id): 9})
        response = ask_both(real, direct, request)
        body = events_of(response.text)[-1]["response"] if stream else response.json()
        if len(body["output"]) > 1:
            kinds |= {item["type"] for item in body["output"]}
        if kinds == {"reasoning", "message", "function_call"}:
            break
    assert kinds == {"reasoning", "message", "function_call"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_that_of_vllm_alone(real: RunningProxy, direct: httpx.Client, name: str, stream: bool) -> None:
    assert ask_both(real, direct, request_of(REFUSED[name], stream=stream)).status_code == 400


def test_an_error_that_vllm_finds_late_is_passed_on(real: RunningProxy, direct: httpx.Client) -> None:
    """Within a stream vLLM alone breaks off without a word."""
    refused = ask_both(real, direct, request_of(NO_TYPE)).json()["error"]
    response = real.client.post("/v1/responses", json=request_of(NO_TYPE, model="starter", stream=True))
    error = events_of(response.text)[-1]
    assert (error["type"], error["code"], error["message"]) == ("error", "400", refused["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", AS_IT_CAME)
def test_what_is_not_exact_goes_to_vllm_as_it_came(
    real: RunningProxy, direct: httpx.Client, max_model_len: int, name: str, stream: bool
) -> None:
    request = request_of(AS_IT_CAME[name], stream=stream)
    assert chat_of(request, max_model_len) is None
    response = ask_both(real, direct, request)
    if response.is_success:
        (row,) = wait_for(lambda: real.rows(call_id=response.headers["x-completion-id"]))
        assert (row.token_ids, row.why_not_trained) == (None, "no_token_ids")


def test_turns_of_a_tool_in_a_namespace_are_one_trajectory(real: RunningProxy) -> None:
    """As Codex plays it: it sends back what it was given, with ids of its own on its messages."""
    cells = {
        "type": "object",
        "properties": {"cell": {"enum": [4, 8]}},
        "required": ["cell"],
        "additionalProperties": False,
    }
    notes = NOTES | {"tools": [MOVE | {"name": "add", "strict": True, "parameters": cells}]}
    items: list[Any] = [{"type": "message", "id": "msg_u", "role": "user", "content": "Play!"}]
    trajectories: list[str] = []
    for turn in range(3):
        request = request_of(
            {
                "input": items,
                "tools": [SEARCH, notes],
                "tool_choice": {"type": "function", "name": "add"},
                "max_output_tokens": 90,
                **BRIEF,
            }
        )
        response = real.client.post("/v1/responses", json=request | {"model": "starter"})
        (call,) = response.json()["output"]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "notes", "add")
        output = [{"type": "input_text", "text": f"turn {turn}"}]
        items += [call, returned(call["call_id"], output) | {"id": f"fco_{turn}"}]
        trajectories.append(response.headers["x-trajectory-id"])
        (row,) = wait_for(lambda call_id=response.headers["x-completion-id"]: real.rows(call_id=call_id))
        assert (row.turn, bool(row.token_ids)) == (turn, True)
    assert len(set(trajectories)) == 1


def test_an_answer_sent_back_without_its_type_continues_its_trajectory(real: RunningProxy) -> None:
    """As Vercel's provider sends it with `store: false`."""
    question = user("Hello from Vercel!")  # no other test asks this
    first = real.client.post(
        "/v1/responses", json=request_of({"store": False, "input": [question], **BRIEF}, model="starter")
    )
    (message,) = first.json()["output"]
    parts = [{"type": "output_text", "text": message["content"][0]["text"]}]
    items = [question, {"role": "assistant", "id": message["id"], "content": parts}, user("And?")]
    second = real.client.post(
        "/v1/responses", json=request_of({"store": False, "input": items, **BRIEF}, model="starter")
    )
    assert second.headers["x-trajectory-id"] == first.headers["x-trajectory-id"]


def test_the_stock_client_plays_with_tools(real: RunningProxy) -> None:
    """Turn by turn it sends back the items it was given; each turn is captured."""
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none") as client:
        items: list[Any] = [user("Hello")]
        prompts: list[list[int]] = []
        for turn in range(3):
            raw = client.responses.with_raw_response.create(
                model="starter",
                instructions="Play.",
                input=items,
                tools=[MOVE | {"strict": True}],
                tool_choice="required",
                reasoning={"effort": "none"},
                temperature=0,
                max_output_tokens=90,
            )
            output = raw.parse().output
            assert [item.type for item in output] == ["function_call"]
            # As the package's own examples do it.
            items += [*output, returned(output[0].call_id, f"turn {turn}")]
            (row,) = wait_for(lambda call_id=raw.headers["x-completion-id"]: real.rows(call_id=call_id))
            assert row.token_ids
            prompts.append(row.prompt_token_ids)
        assert len(prompts[0]) < len(prompts[1]) < len(prompts[2])


def test_the_stock_client_hears_a_stream_to_its_end(real: RunningProxy) -> None:
    with (
        openai.OpenAI(base_url=real.url + "/v1", api_key="none") as client,
        client.responses.stream(model="starter", input="Hello", temperature=0, max_output_tokens=12) as events,
    ):
        whole = events.get_final_response()
    assert whole.status == "completed"
    assert whole.output[0].type == "reasoning"
