"""Messages translated to chat, beside the real vLLM's own /v1/messages: prompt, sampling, answer are equal.

Ids, signatures of thoughts and the model's name may differ, and where a stream is cut into pieces: vLLM itself cuts it
by how busy it is.
"""

import asyncio
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from proxy.domain.chat_rules import ChatRules
from proxy.upstream.chat_rules_probe import probe_chat_rules
from proxy.upstream.server import Upstream
from proxy.wire.anthropic.request import translate
from tests.sharing import every_second
from tests.unit.proxy.both import ATTEMPTS
from tests.unit.proxy.conftest import RunningProxy, wait_for

pytestmark = pytest.mark.stack

MODEL = "starter@v0"
MOVE = {
    "name": "move",
    "description": "Take a cell",
    "input_schema": {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]},
}
PASS = {"name": "pass_on", "input_schema": {"properties": {}}}
SCHEMA = {"type": "object", "properties": {"cell": {"type": "integer", "maximum": 8}}, "required": ["cell"]}
BRIEF = {"chat_template_kwargs": {"enable_thinking": False}}
"""No thoughts: the starter model then speaks, calls tools and writes JSON where it must."""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(words: str, **values: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | values


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def changed(how: str, *, name: str = "", definition: Any = None) -> dict[str, Any]:
    """A system message that adds or removes a tool."""
    named, defined = {"type": "tool_reference", "name": name}, {"type": "tool_definition", "definition": definition}
    tool = named if definition is None else defined
    return system([{"type": f"tool_{how}", "tool": tool}])


def thought(words: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": words, "signature": "s"}


def called(tool_use_id: str, cell: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_use_id, "name": "move", "input": {"cell": cell}}


def returned(tool_use_id: str, content: Any = None, **values: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content} | values


def forced(**choice: Any) -> dict[str, Any]:
    return {"tools": [MOVE, PASS], "tool_choice": choice, "max_tokens": 60}


FOUND = {"type": "tool_reference", "tool_name": "move"}
IGNORED: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "container": "c",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "us",
    "mcp_servers": [],
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "speed": "fast",
    "betas": ["interleaved-thinking-2025-05-14"],
}
OF_TOOLS = {"eager_input_streaming": True, "input_examples": [{"cell": 4}], "allowed_callers": ["direct"]}
"""Fields of a tool that vLLM ignores."""
CLAUDE_CODE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "unit/proxy/wire/anthropic/bodies/claude_code.json").read_text()
)
OTHERWISE_HERE = {"model", "stream", "max_tokens", "temperature"}
"""Fields of Claude Code that these tests set themselves."""
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
TOOL_TURN = [
    user("Play!"),
    assistant([thought("The middle."), text("I take it."), called("c1", 4), called("c2", 0)]),
    user([returned("c1", "X"), returned("c2", [text("O"), text("Your turn.")]), text("Go on.")]),
]

CAPTURED: dict[str, dict[str, Any]] = {
    "a text": {},
    "an empty text": {"messages": [user("")]},
    "unicode": {"messages": [user('Grüße, 世界 🙂 \u0000\u2028 "quoted" \\ <|im_end|>')]},
    "a system text": {"system": "You play tic-tac-toe."},
    "an empty system text": {"system": ""},
    "system blocks": {"system": [text("You play "), text("tic-tac-toe.", cache_control={"type": "ephemeral"})]},
    "a billing header": {"system": [text("x-anthropic-billing-header: cch=1;"), text("Be brief.")]},
    "only a system text": {"system": "Speak!", "messages": []},
    "blocks": {"messages": [user([text("Hello"), text("there!")])]},
    "one block": {"messages": [user([text("Hello there!", cache_control={"type": "ephemeral"})])]},
    "empty blocks": {"messages": [user([text(""), text("Hello")]), assistant([text("")]), user("there")]},
    "no blocks": {"messages": [user([]), user("Hello"), assistant([])]},
    "several turns": {"messages": [user("Hello"), assistant("Hi!"), user([text("there")])]},
    "an answer last": {"messages": [user("Hello"), assistant("Hi!")]},
    "two answers": {"messages": [user("a"), assistant("b"), assistant([text("c")]), user("d")]},
    "thoughts": {"messages": [user("a"), assistant([thought("b"), text("c")]), user("d")]},
    "thoughts twice": {"messages": [user("a"), assistant([thought("b"), thought(" c"), text("d")]), user("e")]},
    "only thoughts": {"messages": [user("a"), assistant([thought("b")]), user("c")]},
    "redacted thoughts": {
        "messages": [user("a"), assistant([{"type": "redacted_thinking", "data": "x"}, text("b")]), user("c")]
    },
    "cited words": {
        "messages": [user([text("a", citations=[{"type": "char_location"}])]), assistant([text("b", citations=None)])]
    },
    "system within": {"messages": [user("a"), system("b"), user("c"), assistant("d"), system([text("e")]), user("f")]},
    "system last": {"system": "a", "messages": [user("b"), system([text("c"), text("x-anthropic-billing-header")])]},
    "tools": {"tools": [MOVE]},
    "no tools": {"tools": []},
    "no tools if it will": {"tools": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "a choice of no tools": {"tool_choice": {"type": "auto"}},
    "a tool that is added": {"messages": [user("a"), changed("addition", definition=MOVE), user("b")], **BRIEF},
    "a tool that is removed": {
        "tools": [MOVE, PASS],
        "messages": [user("a"), changed("removal", name="move")],
        **BRIEF,
    },
    "a tool that comes back": {
        "tools": [MOVE | {"defer_loading": True}],
        "messages": [user("a"), changed("removal", name="move"), changed("addition", name="move"), user("b")],
    },
    "no tool is left": {"tools": [PASS], "messages": [user("a"), changed("removal", name="pass_on")]},
    "two tools": {"tools": [MOVE, PASS], **BRIEF},
    "a strict tool": {"tools": [MOVE | {"strict": True}], **BRIEF},
    "a tool of more words": {
        "tools": [MOVE | {"type": "custom", "cache_control": {"type": "ephemeral"}, **OF_TOOLS}],
        **BRIEF,
    },
    "tool results": {"tools": [MOVE], "messages": TOOL_TURN},
    "tool results without tools": {"messages": TOOL_TURN},
    "a tool result alone": {
        "tools": [MOVE],
        "messages": [user("a"), assistant([called("c1", 1)]), user([returned("c1", "X", is_error=True)])],
    },
    "an empty tool result": {
        "tools": [MOVE],
        "messages": [user("a"), assistant([called("c1", 1)]), user([returned("c1")])],
    },
    "a result of other parts": {
        "messages": [
            user("a"),
            assistant([called("c1", 1)]),
            user([returned("c1", [text("X"), {"type": "document"}])]),
        ]
    },
    "a tool that was found": {
        "tools": [MOVE],
        "messages": [user("a"), assistant([called("c1", 1)]), user([returned("c1", [text("a"), FOUND]), text("b")])],
    },
    "an assistant's tool result": {
        "messages": [user("a"), assistant([returned("c1", "b"), returned("c2", [text("c")])]), user("d")]
    },
    "odd arguments": {
        "messages": [
            user("a"),
            assistant([{"type": "tool_use", "id": "c1", "name": "move", "input": {"ß": [1.5, None, {"\n": 10**30}]}}]),
            user([returned("c1", "b")]),
        ]
    },
    "a tool if it will": forced(type="auto"),
    "any tool": forced(type="any"),
    "any tool at once": forced(type="any") | BRIEF,
    "this tool": forced(type="tool", name="move"),
    "this tool at once": forced(type="tool", name="move") | BRIEF,
    "one call": forced(type="any", disable_parallel_tool_use=True) | BRIEF | {"max_tokens": 90},
    "no tool": forced(type="none"),
    "no tool without tools": {"tool_choice": {"type": "none"}},
    "a call cut short": forced(type="any") | BRIEF | {"max_tokens": 14},
    "a call that is stopped": forced(type="any") | BRIEF | {"stop_sequences": ["cell", "}"]},
    "stop": {"stop_sequences": ["o ", "e"], "max_tokens": 24},
    "stop at once": {"stop_sequences": ["o", "Hello"], **BRIEF},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025},
    "thinking as it likes": {"thinking": {"type": "adaptive", "display": "omitted"}},
    "no thinking": {"thinking": {"type": "disabled"}, "max_tokens": 24},
    "no thinking whatever the effort": {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
    "effort": {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9000}}},
    "more effort": {"output_config": {"effort": "xhigh"}, "thinking": {"type": "adaptive"}},
    "a schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 40, **BRIEF},
    "a schema after thoughts": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "an empty schema": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    "no thoughts": BRIEF,
    "one token": {"max_tokens": 1},
    "more than there is room for": {"max_tokens": 2045},
    "nearly greedy": {"temperature": 0.001, "top_p": 0.5, "top_k": 1},
    "greedy by top_k": {"temperature": 1, "top_k": 1},
    "what is ignored": IGNORED,
    **{
        # The starter model has no room for all tools; the helper asks at temperature 1.
        f"Claude Code, {part}": {name: value for name, value in body.items() if name not in OTHERWISE_HERE}
        | {"tools": body["tools"][:1]}
        for part, (*_, body) in CLAUDE_CODE.items()
    },
}
"""What is translated, and answered 200."""

REFUSED: dict[str, dict[str, Any]] = {
    "cold": {"temperature": -1},
    "too much of it": {"top_p": 2},
    "more tokens than the model has": {"max_tokens": 100_000},
    "too long": {"messages": [user("hi " * 3000)]},
    "no messages": {"messages": []},
    "no text": {"messages": [user([])]},
    "an image": {"messages": [user([text("What is this?"), IMAGE])]},
    "an image of a tool's": {"messages": [user("a"), assistant([called("c1", 1)]), user([returned("c1", [IMAGE])])]},
    "an image of no kind": {"messages": [user([{"type": "image", "source": {"data": "aa"}}])]},
    "a file": {"messages": [user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])]},
    "an empty stop": {"stop_sequences": [""]},
}
"""What is translated, and refused by vLLM before it speaks."""

AS_IT_CAME: dict[str, dict[str, Any]] = {
    "no limit": {"max_tokens": None},
    "a limit of nothing": {"max_tokens": 0},
    "messages of text": {"messages": "hi"},
    "no role": {"messages": [{"content": "hi"}]},
    "an unknown role": {"messages": [{"role": "tool", "content": "hi"}]},
    "an unknown block": {"messages": [user([{"type": "video"}])]},
    "a number as text": {"temperature": "0"},
    "hot as text": {"temperature": "hot"},
    "a tool without a schema": {"tools": [{"name": "move"}]},
    "a tool of Anthropic's own": {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
    "a document": {"messages": [user([{"type": "document", "source": {"type": "text", "data": "a"}}])]},
    "a search result": {"messages": [user([{"type": "search_result", "source": "a", "title": "b", "content": []}])]},
    "a tool that is added by the user": {"messages": [user(changed("addition", definition=MOVE)["content"])]},
    "a tool that is removed and is none": {"messages": [user("a"), changed("removal", name="move")]},
    "a tool that was not given": {"tools": [MOVE], "tool_choice": {"type": "tool", "name": "nothing"}},
    "a tool without a name": {"tools": [MOVE], "tool_choice": {"type": "tool"}},
    "a tool without tools": {"tool_choice": {"type": "any"}},
    "too many stops": {"stop_sequences": list("abcde")},
    "a budget over the limit": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
    "a small budget": {"thinking": {"type": "enabled", "budget_tokens": 10}, "max_tokens": 50},
    "no address": {"messages": [user([{"type": "image", "source": {"type": "url"}}])]},
    "a call without id": {
        "messages": [user("a"), assistant([{"type": "tool_use", "name": "move", "input": {}}]), user("b")]
    },
    "an unknown field": {"unknown_field": 1},
}
"""What is not translated: vLLM's own route answers it."""

NO_TYPE = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}}
"""What vLLM refuses late: within a stream."""

GENERATED, GENERATED_ANSWERS = 150, 15

_DIFFERING = re.compile(r'"(id|signature|model)":"(?:[^"\\]|\\.)*"')


@pytest.fixture(scope="module")
def vllm_url(parsing_vllm_url: str) -> str:
    """With parsers for thoughts and tools."""
    return parsing_vllm_url


def request_of(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    request = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": [user("Hello there!")]} | values | more
    return {name: value for name, value in request.items() if value is not None}


def generated(draw: random.Random) -> dict[str, Any]:
    """A request with any of the fields and blocks that vLLM takes."""

    def words() -> str:
        known = ["Hello", "there", "x", "\n", "Grüße", "4", "<tool_call>"]
        return " ".join(draw.choices(known, k=draw.randint(1, 4)))

    def some(*values: Any) -> Any:
        return draw.choice([None, *values])

    def block() -> dict[str, Any]:
        return text(words()) | ({"cache_control": {"type": "ephemeral"}} if draw.random() < 0.3 else {})

    def contents(*least: dict[str, Any]) -> Any:
        blocks = [*least, *(block() for _ in range(draw.randint(0 if least else 1, 2)))]
        return blocks if draw.random() < 0.7 else words()

    names = [MOVE | {"strict": draw.random() < 0.2}, PASS | OF_TOOLS]
    turns: list[dict[str, Any]] = []
    for turn in range(draw.randint(0, 3)):
        call_id = f"toolu_{turn}"
        calls, results = [called(call_id, turn)], [returned(call_id, draw.choice([words(), [block(), FOUND], None]))]
        if draw.random() < 0.5:
            turns += [user(contents()), assistant(contents(thought(words())))]
        else:
            turns += [user(contents()), assistant([thought(words()), *calls]), user([*results, block()])]
        if draw.random() < 0.4:
            turns.append(system(draw.choice([words(), [block(), text("x-anthropic-billing-header: 1")]])))
        if draw.random() < 0.2:
            turns.append(changed("addition", definition=MOVE | {"name": "look"}))
    tools = some([], names[:1], names)
    choice = draw.choice([{"type": "auto"}, {"type": "none"}, *([{"type": "any"}] if tools else [])])
    thinking = some({"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024})
    values = {
        "messages": [*turns, user(contents())],
        "system": some(words(), [block(), block()]),
        "tools": tools,
        "tool_choice": some(choice | {"disable_parallel_tool_use": draw.random() < 0.5}),
        "thinking": thinking,
        "max_tokens": 1025 if thinking and thinking["type"] == "enabled" else draw.randint(1, 24),
        "output_config": some({"effort": draw.choice(["low", "medium", "high", "xhigh", "max"])}),
        "stop_sequences": some(["e", "o "]),
        "top_p": some(0.9),
        "top_k": some(5),
        "chat_template_kwargs": some(BRIEF["chat_template_kwargs"]),
        **{name: value for name, value in IGNORED.items() if draw.random() < 0.2},
    }
    return request_of(values)


def events_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, each framed as vLLM frames it; pieces of the same block put together."""
    *events, rest = stream.split("\n\n")
    assert rest == ""
    whole: list[dict[str, Any]] = []
    for text_of_event in events:
        match = re.fullmatch(r"event: (\S+)\ndata: ({.*})", text_of_event)
        assert match, text_of_event
        event = json.loads(match[2])
        assert event["type"] == match[1]
        delta = event.get("delta", {})
        if event["type"] == "content_block_delta" and whole[-1].get("delta", {}).get("type") == delta["type"]:
            (part,) = delta.keys() - {"type"}
            whole[-1]["delta"][part] += delta[part]
        else:
            whole.append(event)
    return whole


def compared(response: httpx.Response) -> Any:
    """What must be equal: every byte of a whole answer, every event of a stream, with the order of its keys."""
    kind = response.headers["content-type"]
    streamed = kind.startswith("text/event-stream")
    said = json.dumps(events_of(response.text), separators=(",", ":")) if streamed else response.text
    # Errors name the model, and count the fields: with the cache salt there is one more.
    said = re.sub("<dict of [0-9]+ items>", "<dict>", said.replace(MODEL, "starter"))
    return response.status_code, kind, _DIFFERING.sub(r'"\1":…', said)


def ask_both(real: RunningProxy, direct: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    """Ask the proxy, and vLLM alone; the answers are equal."""
    for _ in range(ATTEMPTS):
        response = real.client.post("/v1/messages", json=request | {"model": "starter"})
        alone = direct.post("/v1/messages", json=request)
        # Of two tokens that are nearly as likely, a batch decides.
        if compared(response) == compared(alone):
            break
    assert compared(response) == compared(alone)
    return response


def check_record(real: RunningProxy, direct: httpx.Client, response: httpx.Response, request: dict[str, Any]) -> Any:
    """It is recorded with the ids of the prompt, as vLLM itself makes it of this request, and of the whole answer."""
    (row,) = wait_for(lambda: real.rows(call_id=response.headers["x-completion-id"]))
    assert (row.endpoint, row.status, row.streamed) == ("messages", "complete", bool(request.get("stream")))
    assert row.prompt_token_ids == direct.post("/v1/messages/render", json=request).json()["token_ids"]
    assert len(row.token_ids) == len(row.inference_logprobs) == row.completion_tokens > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in row.inference_logprobs)
    return row


def rendered(direct: httpx.Client, request: dict[str, Any], chat: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What vLLM makes of the request, and of the chat that stands for it."""
    parts = ("token_ids", "sampling_params", "reasoning_parser_kwargs", "reasoning_ended")
    made = [
        direct.post(f"/v1/{route}/render", json=body)
        for route, body in (("messages", request), ("chat/completions", chat))
    ]
    return [{part: one.json()[part] for part in parts} for one in made]


@pytest.fixture(scope="module")
def rules(vllm_url: str) -> ChatRules:
    """The server's rules, as the proxy finds them out."""

    async def probe() -> ChatRules:
        upstream = Upstream(vllm_url + "/v1", 60)
        try:
            return await probe_chat_rules(upstream, MODEL)
        finally:
            await upstream.close()

    return asyncio.run(probe())


def chat_of(request: dict[str, Any], rules: ChatRules) -> dict[str, Any] | None:
    translation = translate(request, rules)
    return None if translation is None else translation.chat


def test_the_server_says_how_it_makes_a_chat(rules: ChatRules) -> None:
    """Its template takes a system message anywhere, and knows neither effort nor an empty list of tools."""
    assert rules == ChatRules(merges_system=False, disabled_effort="low", ignores_empty_tools=True)


def check_prompt_and_sampling(direct: httpx.Client, request: dict[str, Any], rules: ChatRules) -> None:
    # This route takes thinking `disabled` for the effort "none", whatever the server makes of it.
    of_route = msgspec.structs.replace(rules, disabled_effort="none")
    alone, translated = rendered(direct, request, chat_of(request, of_route))
    assert alone == translated
    assert len(alone["token_ids"]) > 0


@pytest.mark.parametrize("name", CAPTURED)
def test_prompt_and_sampling_are_those_of_vllm_alone(direct: httpx.Client, rules: ChatRules, name: str) -> None:
    check_prompt_and_sampling(direct, request_of(CAPTURED[name]), rules)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long(part="exact"))])
def test_generated_requests_have_the_prompt_and_sampling_of_vllm_alone(
    direct: httpx.Client, rules: ChatRules, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(GENERATED):
        check_prompt_and_sampling(direct, generated(draw), rules)


def test_generated_requests_have_the_answers_of_vllm_alone(real: RunningProxy, direct: httpx.Client) -> None:
    draw = random.Random(3)
    for _ in range(GENERATED_ANSWERS):
        request = generated(draw)
        response = ask_both(real, direct, request)
        assert response.status_code == 200
        check_record(real, direct, response, request)


@pytest.mark.parametrize("name", every_second(CAPTURED, "exact"))  # as a stream each of them is asked
def test_a_plain_answer_is_that_of_vllm_alone(real: RunningProxy, direct: httpx.Client, name: str) -> None:
    request = request_of(CAPTURED[name])
    response = ask_both(real, direct, request)
    assert response.status_code == 200
    body = response.json()
    row = check_record(real, direct, response, request)
    assert (body["model"], body["id"]) == ("starter", row.upstream_id)
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (row.prompt_tokens, row.completion_tokens)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_stream_is_that_of_vllm_alone(real: RunningProxy, direct: httpx.Client, name: str) -> None:
    request = request_of(CAPTURED[name], stream=True)
    response = ask_both(real, direct, request)
    first, *_, before, last = events_of(response.text)
    assert (first["type"], before["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    row = check_record(real, direct, response, request)
    assert (first["message"]["model"], first["message"]["id"]) == ("starter", row.upstream_id)
    assert before["usage"]["output_tokens"] == row.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_that_of_vllm_alone(
    real: RunningProxy, direct: httpx.Client, rules: ChatRules, name: str, stream: bool
) -> None:
    request = request_of(REFUSED[name], stream=stream)
    assert chat_of(request, rules) is not None
    assert ask_both(real, direct, request).status_code == 400


def test_an_error_that_vllm_finds_late_is_passed_on(real: RunningProxy, direct: httpx.Client) -> None:
    """vLLM alone tells, in its place, that it cannot read its own error."""
    refused = ask_both(real, direct, request_of(NO_TYPE)).json()["error"]
    response = real.client.post("/v1/messages", json=request_of(NO_TYPE, model="starter", stream=True))
    (event,) = events_of(response.text)
    assert event == {"type": "error", "error": {"type": "internal_error", "message": refused["message"]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", AS_IT_CAME)
def test_what_is_not_exact_goes_to_vllm_as_it_came(
    real: RunningProxy, direct: httpx.Client, rules: ChatRules, name: str, stream: bool
) -> None:
    request = request_of(AS_IT_CAME[name], stream=stream)
    assert chat_of(request, rules) is None
    response = ask_both(real, direct, request)
    if response.is_success:
        (row,) = wait_for(lambda: real.rows(call_id=response.headers["x-completion-id"]))
        assert (row.token_ids, row.why_not_trained) == (None, "no_token_ids")


def test_the_stock_client_plays_with_tools(real: RunningProxy) -> None:
    game = {"X-Trajectory-Id": "a-game-of-messages"}
    with anthropic.Anthropic(base_url=real.url, api_key="none", default_headers=game) as client:
        messages: list[Any] = [user("Hello")]
        for turn in range(3):
            said = client.messages.create(
                model="starter",
                system="Play.",
                messages=messages,
                tools=[MOVE | {"strict": True}],
                tool_choice={"type": "any"},
                max_tokens=90,
                extra_body=BRIEF | {"temperature": 0},
            )
            calls = [block for block in said.content if block.type == "tool_use"]
            assert (calls[0].name, said.stop_reason) == ("move", "tool_use")
            # As the package's own examples send an answer back.
            messages += [assistant(said.content), user([returned(call.id, f"turn {turn}") for call in calls])]
        with client.messages.stream(model="starter", messages=[user("Hello")], max_tokens=12) as stream:
            whole = stream.get_final_message()
        assert whole.content[0].type == "thinking"
    rows = real.recorded(4, trajectory_id=game["X-Trajectory-Id"])
    assert all(row.token_ids and row.status == "complete" for row in rows)
